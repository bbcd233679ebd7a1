"""Learning-rate schedules: a pure function of the step number, so that resuming needs no state but that
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hetero.errors import ArgumentError

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Name -> factor of the peak rate at `progress` in [0, 1] of the steps that follow the warm-up."""


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `lr`, then a shape down to `min_ratio * lr` at `total_steps`.

    Step 0 of a warm-up of w steps trains at lr / w, step w - 1 at lr. `total_steps` is needed by every
    shape but "constant"; past it the rate stays at its last value.
    """

    lr: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise ArgumentError(f"schedule is {self.kind!r}; expected one of {', '.join(SHAPES)}")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ArgumentError(f"lr is {self.lr}; expected a finite number >= 0")
        if self.warmup_steps < 0:
            raise ArgumentError(f"warmup_steps is {self.warmup_steps}; expected 0 or more")
        if not 0 <= self.min_ratio <= 1:
            raise ArgumentError(f"min_ratio is {self.min_ratio}; expected a number from 0 to 1")
        if self.kind != "constant" and self.total_steps is None:
            raise ArgumentError(
                f"schedule {self.kind!r} needs total_steps: the number of optimizer steps of the run"
            )
        if self.total_steps is not None and self.total_steps < 1:
            raise ArgumentError(f"total_steps is {self.total_steps}; expected at least 1")

    def __call__(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        span = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / span, 1.0)
        return self.lr * (self.min_ratio + (1.0 - self.min_ratio) * SHAPES[self.kind](progress))
