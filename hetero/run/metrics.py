"""The record of a step in metrics.jsonl, from what rollout, trainer and clock say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetero.engine.stats import EngineStats
from hetero.rl.metrics import rollout_metrics
from hetero.rl.rollout import Rollout

WALL_TIME = ("time/", "perf/", "kv/disk_", "kv/ram_")
"""Metrics that a repeated step need not repeat: they depend on the clock, or on what earlier runs left."""
SCHEDULE = ("kv/",)
"""Metrics that depend on how far the coming steps' answers are; with `rl.max_staleness` 0 there are none."""
KV_COUNTS = (
    "stale_refused",
    "ram_stored",
    "ram_found",
    "ram_in_time",
    "ram_faster",
    "disk_found",
    "disk_in_time",
    "disk_faster",
    "disk_written",
    "disk_dropped",
    "disk_refused",
    "disk_errors",
)
"""Counts of `EngineStats` that become kv/<name>."""


def step_record(
    step: int,
    rolled: Rollout,
    trained: Mapping[str, float],
    engine: EngineStats,
    seconds: Mapping[str, float],
    data: Mapping[str, float],
) -> dict[str, Any]:
    """All metrics of a step; what is not finite is None.

    Args:
        trained: what the trainer says; `loss` and `grad_norm` are 0 when nothing could be trained.
        engine: what the engine did in this step.
        seconds: time/<part> of the step.
        data: counters of the data.
    """
    prompt_tokens = engine.prefill_tokens + engine.cached_tokens
    perf = {
        "perf/rollout_tok_s": _rate(engine.sampled_tokens, engine.seconds),
        "perf/prefill_tok_s": _rate(engine.prefill_tokens, engine.prefill_seconds),
        "perf/decode_tok_s": _rate(engine.decode_tokens, engine.decode_seconds + engine.sample_seconds),
        "perf/train_tok_s": _rate(trained.get("train/tokens", 0.0), seconds["time/train"]),
        "perf/tokens_s": _rate(trained.get("train/tokens", 0.0), seconds.get("time/step", 0.0)),
        "kv/hit_rate": engine.cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "kv/preemptions": engine.num_preemptions,
        "off_policy/dropped": engine.num_dropped,
        **{f"kv/{name}": getattr(engine, name) for name in KV_COUNTS},
    }
    parts = {"step": step, **rollout_metrics(rolled.groups), **trained, **data, **perf, **seconds}
    return {name: finite(value) for name, value in parts.items()}


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
