"""Measures what users wait for: median and 99th percentile of each operation, and what an idle box costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.template import Template

T = TypeVar("T")
_CHILDREN = 8
OPERATIONS = ("create", "exec", "snapshot", "fork", "close", "python_cold", "python_warm", "python_next")
MODULES = (
    "argparse",
    "asyncio",
    "collections",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "email.message",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "http.client",
    "itertools",
    "json",
    "logging",
    "math",
    "multiprocessing",
    "pathlib",
    "random",
    "re",
    "sqlite3",
    "statistics",
    "typing",
    "unittest",
)
"""What Python programs of models often import."""


def measure(n: int, num_idle: int = 20) -> Iterator[dict[str, Any]]:
    """One object per operation: op, n, p50_ms, p99_ms; last idle with pss_mb of one box.

    A fork is timed per child of eight. A snapshot ends when the box runs again over the new layer.
    "python_cold" and "python_warm" are a new box until its first Python code has run, which uses MODULES;
    "python_next" is the code after that.
    """
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def timed(name: str, action: Callable[[], T], share: int = 1) -> T:
        started = time.perf_counter()
        result = action()
        times[name].append((time.perf_counter() - started) * 1e3 / share)
        return result

    Sandbox.create().close()
    for _ in range(n):
        box = timed("create", Sandbox.create)
        result = timed("exec", lambda: box.exec(["true"]))  # noqa: B023
        if not result.ok:
            raise RuntimeError(f"`true` ended with {result}")
        sealed = timed("snapshot", box.snapshot)
        if len(times["fork"]) < max(n // 4, 1):
            for child in timed("fork", lambda: sealed.fork(_CHILDREN), _CHILDREN):  # noqa: B023
                child.close()
        sealed.close()
        timed("close", box.close)
    for name, template in (("python_cold", None), ("python_warm", Template(MODULES))):
        Sandbox.create(template=template).close()
        for _ in range(max(n // 4, 1)):
            box = timed(name, lambda: _first_python(template))  # noqa: B023
            timed("python_next", lambda: box.python("1 + 1"))  # noqa: B023
            box.close()
    for name, values in times.items():
        values.sort()
        yield {
            "op": name,
            "n": len(values),
            "p50_ms": round(values[len(values) // 2], 3),
            "p99_ms": round(values[min(int(len(values) * 0.99), len(values) - 1)], 3),
        }
    yield {"op": "idle", "n": num_idle, "pss_mb": round(idle_pss_mb(num_idle), 3)}


def _first_python(template: Template | None) -> Sandbox:
    box = Sandbox.create(template=template)
    result = box.python(f"import {', '.join(MODULES)}")
    if not result.ok:
        raise RuntimeError(f"the imports ended with {result}")
    return box


def idle_pss_mb(count: int) -> float:
    """Proportional set size of one idle box that has run a command, megabytes: its own processes, and its
    share of the launcher's."""
    boxes = [Sandbox.create() for _ in range(count)]
    try:
        for box in boxes:
            box.exec(["true"])
        launcher = boxes[0]._shared.launcher
        pids = launcher.ask("state", "")["ok"]["boxes"]
        total = sum(_pss_kb(pids[box.id]) for box in boxes)
        return (total + _pss_kb(launcher.process.pid)) / count / 1024
    finally:
        for box in boxes:
            box.close()


def _pss_kb(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(row.split()[1]) for row in file if row.startswith("Pss:"))
