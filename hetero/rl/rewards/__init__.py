"""Reward functions: the built-in ones, and the processes that run them and yours."""

from __future__ import annotations

from hetero.rl.rewards.pool import RewardPool, Sample
from hetero.rl.rewards.score import Failure, Score
from hetero.rl.rewards.spec import REWARDS, RewardSpec

__all__ = ["REWARDS", "Failure", "RewardPool", "RewardSpec", "Sample", "Score"]
