"""Append-only JSON-lines files that can be rewound to a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Journal:
    """One file with one JSON object per line, each with a `step`.

    A line is written with a single call and synced, so that after `kill -9` at most the last line is torn;
    `rewind` drops it together with every line of a later step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the records, then sync once."""
        text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        if not text:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, in order."""
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        return [json.loads(line) for line in whole.split("\n") if line]

    def rewind(self, step: int) -> None:
        """Drop what comes after `step`, atomically."""
        if not self.path.exists():
            return
        kept = [record for record in self.read() if record["step"] <= step]
        draft = self.path.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        draft.touch()
        Journal(draft).write(kept)
        draft.replace(self.path)
