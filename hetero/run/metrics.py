"""The record of a step in metrics.jsonl, from what rollout, trainer and clock say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetero.engine.stats import EngineStats
from hetero.rl.metrics import rollout_metrics
from hetero.rl.rollout import Rollout

WALL_TIME = ("time/", "perf/")
"""Metrics that a repeated step need not repeat."""


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
        "perf/rollout_tok_s": _rate(rolled.num_tokens, rolled.seconds_generate),
        "perf/prefill_tok_s": _rate(engine.prefill_tokens, engine.prefill_seconds),
        "perf/decode_tok_s": _rate(engine.decode_tokens, engine.decode_seconds + engine.sample_seconds),
        "perf/train_tok_s": _rate(trained.get("train/tokens", 0.0), seconds["time/train"]),
        "kv/hit_rate": engine.cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "kv/preemptions": engine.num_preemptions,
    }
    parts = {"step": step, **rollout_metrics(rolled.groups), **trained, **data, **perf, **seconds}
    return {name: finite(value) for name, value in parts.items()}


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
