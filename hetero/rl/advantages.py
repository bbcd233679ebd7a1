"""How much better than expected each trajectory was: the weight of its tokens in the loss.

Every function maps rewards [P, G] float64 (P groups of G trajectories, NaN where a trajectory is masked) to
advantages [P, G]. A masked trajectory gets 0 and is no part of any mean, spread or count. Where nothing can
be learnt from a comparison (all rewards equal within ZERO_SPREAD, or fewer than two of them) the advantage
is exactly 0.

Notation: R_i a reward, mean and std over its group unless said otherwise, std with n - 1 in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.errors import RecipeError
from hetero.rl.trajectory import Group

Array: TypeAlias = npt.NDArray[np.float64]

ZERO_SPREAD = 1e-6
"""Rewards of a group that differ by no more than this are equal: a judge's rounding is no signal."""
STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


def has_spread(rewards: Array) -> npt.NDArray[np.bool_]:
    """[P]: whether a group has at least two rewards that differ."""
    known = np.isfinite(rewards)
    high = np.where(known, rewards, -np.inf).max(axis=1, initial=-np.inf)
    low = np.where(known, rewards, np.inf).min(axis=1, initial=np.inf)
    return np.asarray((known.sum(axis=1) > 1) & (high - low > ZERO_SPREAD))


def group_mean(rewards: Array) -> Array:
    """R_i - mean: Dr. GRPO, arXiv 2503.20783."""
    return _finish(_centred(rewards), has_spread(rewards))


def group_std(rewards: Array) -> Array:
    """(R_i - mean) / (std + 1e-4): GRPO, arXiv 2402.03300."""
    centred, (count, _) = _centred(rewards), _moments(rewards)
    squares = np.nansum(centred**2, axis=1, keepdims=True)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    return _finish(centred / (std + STD_EPSILON), has_spread(rewards))


def rloo(rewards: Array) -> Array:
    """R_i - mean of the others = n / (n - 1) (R_i - mean): leave-one-out, arXiv 2402.14740."""
    count, _ = _moments(rewards)
    return _finish(_centred(rewards) * count / np.maximum(count - 1, 1), has_spread(rewards))


def batch_std(rewards: Array) -> Array:
    """(R_i - mean) / (std over the batch + 1e-4): arXiv 2508.08221; TRL's scale_rewards="batch"."""
    return _finish(_centred(rewards) / (_std(rewards) + STD_EPSILON), has_spread(rewards))


def batch_norm(rewards: Array) -> Array:
    """(R_i - mean over the batch) / (std over the batch + 1e-4): REINFORCE++, arXiv 2501.03262, with one
    reward at the end.

    Over trajectories, each counted once whatever its length. A group of equal rewards is compared with the
    other groups.
    """
    known = rewards[np.isfinite(rewards)]
    if len(known) < 2 or known.max() - known.min() <= ZERO_SPREAD:
        return np.zeros_like(rewards)
    return np.where(np.isfinite(rewards), (rewards - known.mean()) / (_std(rewards) + STD_EPSILON), 0.0)


def maxrl(rewards: Array) -> Array:
    """(R_i - mean) / mean: rare successes weigh more, arXiv 2602.02710. For rewards of 0 and more."""
    if np.nanmin(rewards, initial=0.0) < 0:
        raise RecipeError(
            f"The advantage maxrl divides by a group's mean reward, so none may be negative, but one is "
            f"{np.nanmin(rewards)}. Shift the reward or choose another algorithm."
        )
    _, mean = _moments(rewards)
    return _finish(_centred(rewards) / np.where(mean > 0, mean, 1.0), has_spread(rewards))


ADVANTAGES: dict[str, Callable[[Array], Array]] = {
    function.__name__: function for function in (group_mean, group_std, rloo, batch_std, batch_norm, maxrl)
}
"""Name -> advantage function."""


def assign_advantages(groups: Sequence[Group], name: str) -> int:
    """Set the advantage of every trajectory; how many trajectories have one that is not 0.

    Zero of them means that there is nothing to learn from this step.
    """
    if not groups:
        return 0
    rewards = reward_table(groups)
    advantages = ADVANTAGES[name](rewards)
    for row, group in zip(advantages.tolist(), groups, strict=True):
        for advantage, trajectory in zip(row, group.trajectories, strict=False):
            trajectory.advantage = advantage
    return int(np.count_nonzero(advantages))


def reward_table(groups: Sequence[Group]) -> Array:
    """[P, G] rewards, NaN where a trajectory is masked or a group has fewer than the largest."""
    table = np.full((len(groups), max((len(group.trajectories) for group in groups), default=0)), np.nan)
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group.trajectories):
            if trajectory.reward is not None:
                table[i, j] = trajectory.reward
    return table


def _moments(rewards: Array) -> tuple[Any, Any]:
    """([P, 1] number, [P, 1] mean) of the known rewards of each group."""
    known = np.isfinite(rewards)
    count = known.sum(axis=1, keepdims=True)
    return count, np.where(known, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)


def _centred(rewards: Array) -> Array:
    return np.asarray(rewards - _moments(rewards)[1])


def _std(rewards: Array) -> float:
    """Over all known rewards of the batch."""
    known = rewards[np.isfinite(rewards)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0


def _finish(advantages: Array, useful: npt.NDArray[np.bool_]) -> Array:
    return np.where(useful[:, None] & np.isfinite(advantages), advantages, 0.0)
