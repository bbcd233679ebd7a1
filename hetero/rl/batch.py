"""From groups to what the trainer learns from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.rl.trajectory import Group
from hetero.train.batch import TrainSample


def train_samples(groups: Sequence[Group], *, train_truncated: bool = True) -> list[TrainSample]:
    """A sample for every trajectory that may be learnt from: it has a reward and sampled something.

    Args:
        train_truncated: whether to learn from completions that reached the token limit. Without them they
            are still part of their group's baseline.
    """
    return [
        TrainSample(
            prompt_ids=trajectory.prompt_ids,
            completion_ids=trajectory.completion_ids,
            logprobs=trajectory.logprobs,
            advantage=trajectory.advantage,
            mask=None if all(trajectory.mask) else trajectory.mask,
            group=group.serial,
            adapter_version=trajectory.adapter_version,
            routes=np.concatenate(trajectory.routes) if trajectory.routes else None,
        )
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None
        and trajectory.num_sampled
        and (train_truncated or trajectory.finish_reason != "length")
    ]
