"""How much of its quiet speed a call keeps while other processes want every core."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero.bench.timing import Budget, time_calls

SETTLE = 0.05
"""Seconds after which the scheduler has spread processes that were just woken."""


class Rivals:
    """Processes that compute without end, asleep until `running`."""

    def __init__(self, count: int) -> None:
        self._processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        self._send(signal.SIGSTOP)

    def _send(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._send(signal.SIGCONT)
        time.sleep(SETTLE)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def __enter__(self) -> Rivals:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def time_among_rivals(call: Callable[[int], object], budget: Budget, count: int) -> dict[str, float | int]:
    """Time `call` in turn alone and beside `count` busy processes.

    Returns:
        {rivals, rivals_ms, share_of_quiet, share_of_quiet_min}: mean milliseconds beside them (a scheduler
        gives time in slices longer than a call, so that a median would hide the waiting), and the speed there
        over the speed alone just before: the median and the least of `budget.repeats` pairs of blocks.
    """
    block = Budget(repeats=1, seconds=max(budget.seconds / max(1, budget.repeats), 0.02))
    calls, busy, shares = 0, [], []
    with Rivals(count) as rivals:
        for _ in range(budget.repeats):
            alone = time_calls(call, block, first=calls)
            calls += len(alone.seconds)
            with rivals.running():
                beside = time_calls(call, block, first=calls)
            calls += len(beside.seconds)
            busy.append(statistics.mean(beside.seconds))
            shares.append(statistics.mean(alone.seconds) / busy[-1])
    return {
        "rivals": count,
        "rivals_ms": 1e3 * statistics.median(busy),
        "share_of_quiet": statistics.median(shares),
        "share_of_quiet_min": min(shares),
    }
