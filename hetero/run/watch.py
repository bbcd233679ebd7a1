"""Who watches a run: the live view implements this; the loop calls it and never looks at what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hetero.recipe.recipe import Recipe

Metrics = Mapping[str, Any]
"""Name -> number (None where it was not finite)."""
Rows = Sequence[Mapping[str, Any]]
"""Completions as in completions.jsonl."""


class Watch(Protocol):
    """Told what a run does, in order."""

    def started(self, recipe: Recipe, out: Path, step: int) -> None:
        """The run is about to load its model; it goes on after `step` (0: from the beginning)."""

    def phase(self, step: int, name: str) -> None:
        """A part of `step` begins: load, rollout, reward, train, save or eval."""

    def progress(self, done: int, total: int) -> None:
        """So many completions of the current part are there."""

    def stepped(self, metrics: Metrics, rows: Rows) -> None:
        """A step is finished and written down."""

    def evaluated(self, record: Metrics) -> None:
        """An evaluation is finished and written down."""

    def ended(self) -> None:
        """The run is over, finished or not: give the terminal back."""


class Unwatched:
    """Nobody watches."""

    def started(self, recipe: Recipe, out: Path, step: int) -> None: ...
    def phase(self, step: int, name: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def stepped(self, metrics: Metrics, rows: Rows) -> None: ...
    def evaluated(self, record: Metrics) -> None: ...
    def ended(self) -> None: ...
