"""Memory: what the plan of a run asks for against what is there, and against what loading really took."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from hetero.doctor.finding import Finding, judge
from hetero.recipe.recipe import Recipe
from hetero.run.plan import Plan, memory_plan, readable

SLACK, FIXED = 1.15, 256 << 20
"""Loading may take this much more than planned: a factor, and bytes for libraries and threads."""


def plan_of(model: str, device: str) -> Plan:
    """The plan of `hetero rl --dry-run` for this model, everything else by default. Raises ModelError."""
    return memory_plan(
        Recipe.from_dict(
            {
                "model": {"path": model, "device": device},
                "data": {"train": "arithmetic"},
                "rl": {"rewards": ["exact"]},
                "train": {"steps": 1},
            }
        )
    )


def check_room(plan: Plan, available: float) -> Finding:
    """Whether a run with default settings fits in `available` bytes."""
    parts = ", ".join(f"{name} {readable(size)}" for name, size in plan.parts.items())
    return judge(
        "memory/plan",
        plan.total <= available,
        f"{readable(plan.total)} needed, {readable(int(available))} available",
        f"A run with default settings does not fit ({parts}). Lower engine.kv_memory, "
        "train.micro_batch_tokens or lora.rank, end other programs, or take a smaller model; "
        "`hetero rl RECIPE --dry-run` shows what each costs.",
    )


def check_loaded(plan: Plan, before: int, after: int) -> Finding:
    """Whether the weights take about as much memory as planned."""
    planned, took = plan.parts["experts"] + plan.parts["other weights"], max(0, after - before)
    return judge(
        "memory/weights",
        took <= SLACK * planned + FIXED,
        f"{readable(took)} taken, {readable(planned)} planned",
        "Loading left more in memory than the packed weights: `hetero rl --dry-run` is too optimistic for "
        "this model. Leave that much room, and report it.",
    )


def available_bytes() -> float:
    """Memory that this process may still take: of the machine, and of its cgroup's (version 2) limit."""
    return min([_meminfo("MemAvailable"), *_cgroup_room()])


def resident_bytes() -> int:
    """Anonymous memory of this process: files that are only mapped do not count."""
    return int(_field(Path("/proc/self/status"), "RssAnon", 0.0))


def _meminfo(name: str) -> float:
    return _field(Path("/proc/meminfo"), name, math.inf)


def _field(file: Path, name: str, default: float) -> float:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return default
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), default)


def _cgroup_room() -> Iterator[float]:
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::")[2].strip()
    except OSError:
        return
    place = Path("/sys/fs/cgroup") / group.lstrip("/")
    for folder in (place, *place.parents):
        try:
            limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
            used = int((folder / "memory.current").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield float(int(limit) - used)
