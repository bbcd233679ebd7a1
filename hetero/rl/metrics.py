"""What a step's groups say in numbers (TRL's names where it has one), and as rows for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hetero.data.messages import text_of
from hetero.rl.advantages import has_spread, reward_table
from hetero.rl.trajectory import Group, Trajectory

_REASONS = ("stop", "length", "abort")
_LONGEST_ERROR = 2000


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of a step's rollouts.

    reward: mean over the trajectories that have one. reward_std: mean over groups of the std (n - 1) within.
    frac_reward_zero_std: share of groups whose rewards are all equal. rewards/<function>/mean|std: of each
    function, unweighted, where it applies. completions/*: sampled tokens per trajectory; clipped_ratio is
    the share that reached the limit, *_terminated_* is over the others. stop/<reason>: share of each finish
    reason. data/*: counts of masked trajectories and of their causes. off_policy/mixed_version_traj: how
    many were sampled by several versions of the adapter (0 unless there is a bug). Means over nothing are
    left out.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = reward_table(groups)
    known = rewards[np.isfinite(rewards)]
    found: dict[str, float] = {}
    if len(known):
        scored = rewards[np.isfinite(rewards).any(axis=1)]
        stds = [float(row[np.isfinite(row)].std(ddof=1)) for row in scored if np.isfinite(row).sum() > 1]
        found["reward"] = float(known.mean())
        found["reward_std"] = float(np.mean(stds)) if stds else 0.0
        found["frac_reward_zero_std"] = float(1 - has_spread(scored).mean())
    found.update(_per_function(trajectories))
    found.update(_lengths(trajectories))
    for reason in _REASONS:
        found[f"stop/{reason}"] = _share(t.finish_reason == reason for t in trajectories)
    kinds = [failure.kind for t in trajectories for failure in t.score.failures]
    found["data/masked"] = sum(t.reward is None for t in trajectories)
    found["data/reward_timeouts"] = kinds.count("timeout")
    found["data/reward_errors"] = len(kinds) - kinds.count("timeout")
    found["data/rollout_errors"] = sum(t.finish_reason == "abort" for t in trajectories)
    found["off_policy/mixed_version_traj"] = sum(len(set(t.adapter_versions)) > 1 for t in trajectories)
    return found


def completion_rows(step: int, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """One plain JSON object for each trajectory: what was asked, said and thought of it."""
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            answer = group.task.columns.get("answer")
            yield {
                "step": step,
                "task": group.task.index,
                "serial": group.serial,
                "sample": number,
                "prompt": text_of(group.task.prompt),
                "completion": trajectory.text,
                "answer": answer if isinstance(answer, (str, int, float, bool)) else None,
                "reward": trajectory.reward,
                "rewards": trajectory.score.values,
                "advantage": trajectory.advantage,
                "num_tokens": trajectory.num_sampled,
                "finish_reason": trajectory.finish_reason,
                "error": trajectory.error[:_LONGEST_ERROR],
            }


def _per_function(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    names = dict.fromkeys(name for t in trajectories for name in t.score.values)
    found: dict[str, float] = {}
    for name in names:
        values = [v for t in trajectories if (v := t.score.values.get(name)) is not None]
        if values:
            found[f"rewards/{name}/mean"] = float(np.mean(values))
            found[f"rewards/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    for part in sorted({part for t in trajectories for part in t.score.parts}):
        found[f"rewards/{part}"] = float(
            np.mean([t.score.parts[part] for t in trajectories if part in t.score.parts])
        )
    return found


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    whole = [t for t in trajectories if t.finish_reason != "abort"]
    ended = [t.num_sampled for t in whole if t.finish_reason != "length"]
    found = {"completions/clipped_ratio": _share(t.finish_reason == "length" for t in whole)}
    for name, lengths in (("", [t.num_sampled for t in whole]), ("terminated_", ended)):
        if lengths:
            found[f"completions/mean_{name}length"] = float(np.mean(lengths))
            found[f"completions/min_{name}length"] = min(lengths)
            found[f"completions/max_{name}length"] = max(lengths)
    return found


def _share(truths: Any) -> float:
    listed = list(truths)
    return sum(listed) / len(listed) if listed else 0.0
