"""Rows of several adapters in one call of a kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetero.errors import ShapeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runs(Generic[T]):
    """Part i belongs to the rows from ends[i - 1] up to ends[i]; None means that they have no adapter.

    The parts are versions of one adapter: they agree in shapes and scale.
    """

    parts: tuple[T | None, ...]
    ends: tuple[int, ...]

    def check(self, num_rows: int) -> None:
        """Raises ShapeError unless the runs cover `num_rows` rows in order."""
        bounds = (0, *self.ends)
        ordered = all(a <= b for a, b in itertools.pairwise(bounds))
        if len(self.parts) != len(self.ends) or not ordered or bounds[-1] != num_rows:
            raise ShapeError(
                f"{len(self.parts)} adapters for rows that end at {list(self.ends)}; expected one end for "
                f"each, ascending, up to the {num_rows} rows of the call"
            )


def listed(lora: T | Runs[T] | None, num_rows: int) -> tuple[list[T | None], list[int]]:
    """The parts and the ends of their rows; both empty when no row has an adapter. Raises ShapeError."""
    if not isinstance(lora, Runs):
        return ([], []) if lora is None else ([lora], [num_rows])
    lora.check(num_rows)
    parts = list(lora.parts)
    return ([], []) if all(part is None for part in parts) else (parts, list(lora.ends))
