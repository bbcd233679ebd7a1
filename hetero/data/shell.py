"""Small tasks for the shell whose result a script can check: counting, sorting, picking, moving files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

from hetero.errors import DataError

_WORDS = """
apple birch cedar delta ember flint grove hazel ivory jade kite lemon maple north olive pearl quartz river
""".split()  # noqa: SIM905 (a list of so many words is better read as text)
_KINDS: dict[str, tuple[str, str, str]] = {
    # what the prompt asks for of {file}, the solution's command, what the file `result` must hold
    "count": ("the number of lines of {file}", "wc -l < {file}", "{count}"),
    "sort": ("the lines of {file}, sorted by name,", "LC_ALL=C sort {file}", "{sorted}"),
    "pick": ("the lines of {file} that contain {word}, in their order,", "grep {word} {file}", "{picked}"),
    "sum": (
        "the sum of the second column of {file}",
        "awk '{{s += $2}} END {{print s}}' {file}",
        "{sum}",
    ),
    "last": ("the last line of {file}", "tail -n 1 {file}", "{last}"),
}


def shell(
    split: str,
    *,
    kinds: str | Iterable[str] = tuple(_KINDS),
    num_tasks: int = 200,
    held_out: float = 0.25,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Tasks over a small file of names and numbers.

    Args:
        split: "train" or "held_out".
        kinds: some of count, sort, pick, sum, last.
        num_tasks: of each kind, both splits together; each has a file of its own.
        held_out: share that is held out.
        seed: of the files.

    Returns:
        Rows with the columns prompt, kind, setup, check and solution, which the reward shell_task reads.
        Raises DataError for a bad option.
    """
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    unknown = [name for name in names if name not in _KINDS]
    if unknown or not names:
        raise DataError(f"shell: kinds must be one or several of {', '.join(_KINDS)}, got {names}.")
    if not 0 < held_out < 1 or num_tasks < 2:
        raise DataError(
            f"shell: held_out is {held_out} and num_tasks {num_tasks}; between 0 and 1, and at least 2."
        )
    num_apart = min(max(round(held_out * num_tasks), 1), num_tasks - 1)
    numbers = range(num_apart) if split == "held_out" else range(num_apart, num_tasks)
    return [_row(name, seed, number) for number in numbers for name in names]


def _row(kind: str, seed: int, number: int) -> dict[str, Any]:
    digest = hashlib.blake2b(f"{seed}:{kind}:{number}".encode(), digest_size=8).digest()
    draw = random.Random(digest)
    lines = [f"{draw.choice(_WORDS)} {draw.randrange(1, 1000)}" for _ in range(draw.randrange(4, 12))]
    word = draw.choice(lines).split()[0]
    facts = {
        "file": f"{draw.choice(_WORDS)}{number}.txt",
        "word": word,
        "count": len(lines),
        "sorted": "\n".join(sorted(lines)),
        "picked": "\n".join(line for line in lines if word in line),
        "sum": sum(int(line.split()[1]) for line in lines),
        "last": lines[-1],
    }
    asked, command, wanted = (text.format(**facts) for text in _KINDS[kind])
    data = "\n".join(lines)
    return {
        "prompt": f"Write {asked} to the file result.",
        "kind": kind,
        "setup": f"cat > {facts['file']} <<'END'\n{data}\nEND\n",
        "check": f'[ "$(sed "s/^ *//" result)" = "$(cat <<\'END\'\n{wanted}\nEND\n)" ]',
        "solution": f"{command} > result",
    }
