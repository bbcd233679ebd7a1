"""How long a tier takes to give a block back, as measured."""

from __future__ import annotations

_WEIGHT = 0.1
"""Of the newest measurement in the running mean."""


class Pace:
    """Running mean of seconds per block; None before the first."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def add(self, seconds: float) -> None:
        """Count one block."""
        known = seconds if self.seconds is None else self.seconds
        self.seconds = known + _WEIGHT * (seconds - known)
