"""Unified diffs: read, and applied to a text where their context is found exactly once near its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hetero.errors import HeteroError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(HeteroError, ValueError):
    """A patch cannot be read, or does not fit its file."""


@dataclass(frozen=True)
class Hunk:
    """`start`: line in the old file, from 1. `lines`: each with its " ", "-" or "+"."""

    start: int
    lines: tuple[str, ...]


def parse(text: str) -> Iterator[tuple[str, list[Hunk]]]:
    """(path, hunks) of each file. Raises PatchError."""
    rows = text.splitlines()
    path, index = "", 0
    hunks: list[Hunk] = []
    while index < len(rows):
        row = rows[index]
        if row.startswith("+++ "):
            if path:
                yield path, hunks
            path, hunks = _path(row[4:]), []
        match = _HUNK.match(row)
        if match and not path:
            raise PatchError(f"line {index + 1}: a hunk before any '+++ path' line")
        index += 1
        if match:
            found: list[str] = []
            left = [int(match[2] or 1), int(match[4] or 1)]
            while index < len(rows) and any(left):
                line = rows[index] or " "
                if line[0] not in " -+\\":
                    raise PatchError(f"line {index + 1}: {line[:40]!r} has no ' ', '-' or '+' in front")
                if line[0] != "\\":
                    found.append(line)
                    left = [left[0] - (line[0] in " -"), left[1] - (line[0] in " +")]
                index += 1
            if any(left):
                raise PatchError(
                    f"a hunk of {path} ends early: {left[0]} old and {left[1]} new lines are missing"
                )
            hunks.append(Hunk(int(match[1]), tuple(found)))
    if not path or not hunks:
        raise PatchError("no '+++ path' line with a '@@ -a,b +c,d @@' hunk was found")
    yield path, hunks


def _path(text: str) -> str:
    name = text.split("\t")[0].strip()
    if name == "/dev/null":
        raise PatchError("files cannot be deleted by a patch; use bash")
    return name[2:] if name.startswith(("a/", "b/")) else name


def apply_hunks(text: str, hunks: list[Hunk], path: str) -> str:
    """`text` after all hunks. Raises PatchError for one that does not fit."""
    lines = text.splitlines()
    shift = 0
    for number, hunk in enumerate(hunks, 1):
        old = [line[1:] for line in hunk.lines if line[0] != "+"]
        new = [line[1:] for line in hunk.lines if line[0] != "-"]
        wanted = max(hunk.start - 1 + shift, 0)
        places = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
        if not places:
            raise PatchError(f"{path}: the lines of hunk {number} are not in the file")
        at = min(places, key=lambda place: abs(place - wanted)) if old else min(wanted, len(lines))
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    ended = text.endswith("\n") or not text
    return "\n".join(lines) + ("\n" if ended and lines else "")
