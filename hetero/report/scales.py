"""Axes of the charts: ranges, round ticks, and where a value lies on the paper."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """Where a chart is drawn: its size and the edges of the area inside the axes, in pixels."""

    width: float
    height: float
    left: float = 46.0
    right: float = 10.0
    top: float = 10.0
    bottom: float = 24.0

    @property
    def across(self) -> tuple[float, float]:
        """x of the area's left and right edge."""
        return self.left, self.width - self.right

    @property
    def upward(self) -> tuple[float, float]:
        """y of the area's lower and upper edge."""
        return self.height - self.bottom, self.top


USUAL, WIDE = Paper(380.0, 172.0), Paper(586.0, 210.0)


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on paper from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a value lies; values outside lie on the edge."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """About `count` round values within the range."""
        step = round_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def steps_axis(steps: Iterable[float], paper: Paper) -> Axis:
    """The x axis over optimiser steps."""
    listed = list(steps)
    low, high = min(listed), max(listed)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Axis(low, high, *paper.across)


def values_axis(
    values: Iterable[float], paper: Paper, low: float | None = None, high: float | None = None
) -> Axis:
    """The y axis over values, with room above and below; `low` and `high` fix an end."""
    listed = list(values)
    bottom = min(listed) if low is None else min(low, *listed)
    top = max(listed) if high is None else max(high, *listed)
    if top - bottom < 1e-12 * max(abs(top), abs(bottom), 1e-300):
        room = abs(top) * 0.5 or 1.0
        bottom, top = (bottom if low is not None else bottom - room), top + room
    room = 0.06 * (top - bottom)
    if low is None:
        bottom -= room
    if high is None:
        top += room
    return Axis(bottom, top, *paper.upward)
