"""Append-only JSON-lines files that can be rewound to a step."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetero.errors import CheckpointError
from hetero.train.checkpoint import storing


class Journal:
    """One file with one JSON object per line, each with a `step`.

    A line is written with a single call and synced, so that after `kill -9` at most the last line is torn;
    `rewind` drops it together with every line of a later step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the records, then sync once. Raises CheckpointError when they cannot be written."""
        text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        if not text:
            return
        with storing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, in order. Raises CheckpointError for one that nothing here has written."""
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        return [self._record(number, line) for number, line in enumerate(whole.split("\n"), 1) if line]

    def _record(self, number: int, line: str) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                return record
        raise CheckpointError(
            f"{self.path} line {number} is damaged: it is no JSON object with a step, but "
            f"{line[:60]!r}. Delete that line."
        )

    def rewind(self, step: int) -> None:
        """Drop what comes after `step`, atomically."""
        if not self.path.exists():
            return
        kept = [record for record in self.read() if record["step"] <= step]
        draft = self.path.with_suffix(".tmp")
        with storing(self.path):
            draft.unlink(missing_ok=True)
            draft.touch()
            Journal(draft).write(kept)
            draft.replace(self.path)
