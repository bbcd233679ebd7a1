"""Evaluation: sampled answers to the held-out tasks, and the share that is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hetero.rl.environment import EnvironmentFactory
from hetero.rl.metrics import rollout_metrics
from hetero.rl.rewards.pool import RewardPool
from hetero.rl.rollout import GenerateFn, rollout
from hetero.rl.task import Task
from hetero.run.metrics import finite

FIRST_SERIAL = 2**40
"""Held-out tasks draw from random streams of their own, the same at every evaluation."""


def evaluate(
    generate: GenerateFn,
    tasks: Sequence[Task],
    make_environment: EnvironmentFactory,
    pool: RewardPool,
    *,
    samples: int,
    sampling: Any,
    correct_from: float,
    step: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """One record of eval.jsonl.

    accuracy: share of the scored completions whose reward is at least `correct_from`. samples: how many were
    scored; masked: how many were not. reward, reward_std, rewards/*, completions/*: as in training.
    time/eval: seconds.
    """
    begin = time.perf_counter()
    rolled = rollout(
        generate,
        tasks,
        make_environment,
        group_size=samples,
        sampling=sampling,
        pool=pool,
        serials=range(FIRST_SERIAL, FIRST_SERIAL + len(tasks)),
        step=step,
        on_progress=on_progress,
    )
    metrics = rollout_metrics(rolled.groups)
    rewards = [t.reward for group in rolled.groups for t in group.trajectories if t.reward is not None]
    correct = sum(reward >= correct_from for reward in rewards)
    record = {
        "step": step,
        "accuracy": correct / len(rewards) if rewards else None,
        "samples": len(rewards),
        "masked": metrics["data/masked"],
        "time/eval": time.perf_counter() - begin,
    }
    kept = ("reward", "completions/")
    return record | {name: finite(value) for name, value in metrics.items() if name.startswith(kept)}
