"""What came of a task: trajectories, and the group of those that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.rl.rewards.score import Score
from hetero.rl.task import Task


@dataclass
class Trajectory:
    """One attempt at a task: n completion tokens, of which the model sampled those with mask True.

    Attributes:
        prompt_ids: tokens that the model was given.
        completion_ids: [n] tokens after the prompt: sampled ones, and in several turns what the environment
            put between.
        logprobs: [n] of the distribution that each was sampled from; 0.0 where mask is False.
        mask: [n] True where the model sampled the token.
        text: what the model said.
        finish_reason: of its last turn: "stop", "length" or "abort".
        adapter_versions: of the adapter that sampled each turn; they are all the same.
        routes: of each turn, the experts that its tokens came from, if the engine records them.
        num_turns: how often the model spoke.
        score: what the reward functions said.
        reward: the weighted sum; None masks the trajectory: it is neither trained on nor part of a baseline.
        advantage: set by `assign_advantages`.
        error: why it has no reward, if it has none.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    adapter_versions: list[int] = field(default_factory=list)
    routes: list[npt.NDArray[np.integer[Any]]] = field(default_factory=list, compare=False)
    num_turns: int = 0
    score: Score = field(default_factory=Score)
    reward: float | None = None
    advantage: float = 0.0
    error: str = ""

    @property
    def adapter_version(self) -> int:
        """Of the adapter that sampled the first turn; 0 before it."""
        return self.adapter_versions[0] if self.adapter_versions else 0

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.mask)


@dataclass
class Group:
    """The trajectories of one task. They are each other's baseline.

    Attributes:
        task: the task.
        serial: how many draws came before this one in the run; with the sample's number it keys the random
            streams.
        trajectories: in the order of their sample numbers.
    """

    task: Task
    serial: int
    trajectories: list[Trajectory]
