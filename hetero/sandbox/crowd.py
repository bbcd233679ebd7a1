"""Many sandboxes that run tests at the same time on few cores: what a command waits for beside its turn."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hetero.sandbox.aio import AsyncSandbox
from hetero.sandbox.errors import SandboxError
from hetero.sandbox.image import python_image
from hetero.sandbox.pool import Pool

_TESTS = """
import unittest

class TestSum(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(sum(range(1000)), 499500)

    def test_sort(self):
        self.assertEqual(sorted([3, 1, 2]), [1, 2, 3])
"""


@dataclass
class Crowd:
    """What happened to the commands of a crowd, in the order in which their turns came; seconds.

    Attributes:
        queued: from the request to its turn.
        started: from its turn to the command's exec, in the box, at most: what it takes to bring the result
            back is in it.
        order: number of each request, in the order of turns; requests are numbered as they come.
        failures: why a command did not do its work; nothing of that is expected.
        most: commands that ran at once.
        seconds: for all of it.
    """

    queued: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    most: int = 0
    seconds: float = 0.0


def command() -> tuple[str, list[str]]:
    """(name, arguments) of the test runner that this interpreter's own directories have, which are what boxes
    see: pytest, else unittest."""
    found = importlib.util.find_spec("pytest")
    if found is None or not str(found.origin).startswith((sys.prefix, sys.base_prefix)):
        return "unittest", [sys.executable, "-m", "unittest", "-q", "test_crowd"]
    return "pytest", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_crowd.py"]


async def crowd(num_boxes: int, max_running: int) -> Crowd:
    """Make `num_boxes` boxes live at once, let each run tests, `max_running` at a time, first come first
    served."""
    found, turns, argv = Crowd(), asyncio.Semaphore(max_running), command()[1]
    everyone, running, made, arrivals = asyncio.Event(), 0, 0, iter(range(num_boxes))

    async def one(pool: Pool) -> None:
        nonlocal running, made
        async with pool.lease() as box:
            await box.write_file("test_crowd.py", _TESTS)
            made += 1
            if made == num_boxes:
                everyone.set()
            await everyone.wait()
            number, arrived = next(arrivals), time.monotonic()
            async with turns:
                begun = time.monotonic()
                found.queued.append(begun - arrived)
                found.order.append(number)
                running += 1
                found.most = max(found.most, running)
                await _run(box, argv, begun, found)
                running -= 1

    begun = time.monotonic()
    pool = Pool(python_image(), warm=(0, 0), max_live=num_boxes, max_running=num_boxes)
    async with pool:
        await asyncio.gather(*(one(pool) for _ in range(num_boxes)))
    found.seconds = time.monotonic() - begun
    return found


async def _run(box: AsyncSandbox, argv: list[str], begun: float, found: Crowd) -> None:
    try:
        result = await box.exec(argv, timeout=300)
    except SandboxError as error:
        found.failures.append(str(error))
        return
    if not result.ok:
        found.failures.append((result.stderr or result.stdout)[-300:] or result.reason)
    found.started.append(time.monotonic() - begun - result.wall_s)


def measure_crowd(num_boxes: int) -> dict[str, Any]:
    """One record: op "crowd", n boxes, how many ran at once, failures, and milliseconds of waiting for the
    turn (queue) and from the turn to the start of the command (start)."""
    cores = len(os.sched_getaffinity(0))
    found = asyncio.run(crowd(num_boxes, cores))
    queued, started = sorted(found.queued), sorted(found.started)

    def at(values: list[float], share: float) -> float:
        return round(values[min(int(len(values) * share), len(values) - 1)] * 1e3, 3) if values else 0.0

    return {
        "op": "crowd",
        "n": num_boxes,
        "command": command()[0],
        "running": found.most,
        "failed": len(found.failures),
        "overtaken": sum(a > b for a, b in zip(found.order, found.order[1:], strict=False)),
        "queue_p50_ms": at(queued, 0.5),
        "queue_p99_ms": at(queued, 0.99),
        "start_p50_ms": at(started, 0.5),
        "start_p99_ms": at(started, 0.99),
        "seconds": round(found.seconds, 3),
    }
