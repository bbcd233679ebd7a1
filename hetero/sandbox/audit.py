"""The journal of what sandboxes did: JSON lines outside of every box, each with the hash of the one before.

A line is written, and handed to the kernel, before the caller gets the result it tells of.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero.sandbox.errors import SandboxInfraError

GENESIS = "0" * 64
_LONGEST_TEXT = 4096


class Audit:
    """One journal; any thread may write. An existing file is continued, if its chain holds.

    Args:
        path: the file; missing directories are made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._seq, self._last = verify(path) if path.exists() else (0, GENESIS)
        if path.exists():
            _cut_torn_line(path)
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, **fields: Any) -> None:
        """Append one event. Raises SandboxInfraError when it cannot be written."""
        with self._lock:
            event = {"seq": self._seq, "time": time.time(), "monotonic": time.monotonic(), **fields}
            event["prev"] = self._last
            line = _line(event)
            digest = hashlib.sha256(line).hexdigest()
            data = line[:-1] + b',"hash":"' + digest.encode() + b'"}\n'
            try:
                if os.write(self._handle, data) != len(data):
                    raise OSError(28, "short write")
            except OSError as error:
                raise SandboxInfraError(
                    f"The audit journal {self.path} cannot be written: {error}."
                ) from error
            self._seq, self._last = self._seq + 1, digest

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=True).encode()


def shortened(argv: list[str]) -> dict[str, Any]:
    """A command for the journal: in full up to 4 KB, else its start and the hash of all of it."""
    text = json.dumps(argv)
    if len(text) <= _LONGEST_TEXT:
        return {"argv": argv}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"argv_start": text[:_LONGEST_TEXT], "argv_sha256": digest, "argv_length": len(text)}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a journal; a torn last line, as a kill leaves it, is left out."""
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)


def verify(path: Path) -> tuple[int, str]:
    """(number of events, hash of the last). Raises SandboxInfraError at the first broken link."""
    last, count = GENESIS, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            body, _, tail = line.rpartition(b',"hash":"')
            digest = hashlib.sha256(body + b"}").hexdigest()
            try:
                event = json.loads(line)
            except ValueError:
                event = {}
            if tail != digest.encode() + b'"}\n' or event.get("prev") != last or event.get("seq") != count:
                raise SandboxInfraError(
                    f"The audit journal {path} was changed: line {number} does not follow from the last."
                )
            last, count = digest, count + 1
    return count, last
