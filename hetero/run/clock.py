"""Wall time of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Sums the seconds spent in named parts since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.parts: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that somebody else measured to `name`."""
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def metrics(self) -> dict[str, float]:
        """`time/<part>` of every part, and `time/step` since the clock was made."""
        return {f"time/{name}": seconds for name, seconds in self.parts.items()} | {
            "time/step": time.perf_counter() - self._start
        }
