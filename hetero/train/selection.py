"""Which samples of a batch enter the loss, and how much a token of each weighs.

A sample without a trained token never enters. For a policy gradient without KL term a group in which every
trained token has advantage zero (all its rewards were equal) cannot move the parameters: it is counted and
neither computed nor part of the denominator, so "token_mean" is the mean over the tokens of the groups that
carry signal, as in DAPO. Aggregate "dr_grpo" alone divides by a constant, and there skipped samples count
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero.errors import DataError
from hetero.train.batch import TrainSample
from hetero.train.losses import LossConfig, aggregate_weights
from hetero.train.metrics import Floats


@dataclass(frozen=True)
class Selection:
    """What enters, and how. Weights and denominator as in `aggregate_weights`; counters for the log.

    probe: the first group, when groups were there and none entered, so that log-probabilities can be compared
        even in a step that trains nothing. Its weights are zero.
    """

    samples: list[TrainSample]
    weights: Floats
    denominator: float
    probe: list[TrainSample]
    counters: dict[str, float]


def select(samples: Sequence[TrainSample], config: LossConfig) -> Selection:
    """Raises DataError for no samples, and for supervised samples of which none has a trained token."""
    if not samples:
        raise DataError("forward_backward got no samples; skip the step when a batch is empty")
    live = [sample for sample in samples if sample.trained.any()]
    if not live and config.is_supervised:
        raise DataError(
            f"not one of {len(samples)} samples has a trained token: the mask excludes everything. "
            "Check the chat template's assistant mask and the truncation length."
        )
    groups: dict[int, list[TrainSample]] = defaultdict(list)
    for sample in live:
        groups[sample.group].append(sample)
    flat = {
        number
        for number, members in groups.items()
        if config.uses_advantages and all(sample.is_flat for sample in members)
    }
    entering = [sample for sample in live if sample.group not in flat]
    weights, denominator = _weights(entering, config)
    if config.aggregate == "dr_grpo":
        denominator = _weights(live, config)[1]
    probe = groups[live[0].group] if live and not entering else []
    return Selection(
        samples=entering,
        weights=weights if entering else np.zeros(len(probe)),
        denominator=denominator if entering else 0.0,
        probe=probe,
        counters={
            "train/samples": float(len(entering)),
            "train/groups": float(len(groups) - len(flat)),
            "train/groups_skipped": float(len(flat)),
            "train/samples_masked": float(len(samples) - len(live)),
        },
    )


def _weights(samples: list[TrainSample], config: LossConfig) -> tuple[Floats, float]:
    counts = torch.tensor([int(sample.trained.sum()) for sample in samples], dtype=torch.int64)
    groups = torch.tensor([sample.group for sample in samples], dtype=torch.int64)
    weights, denominator = aggregate_weights(counts, groups, config)
    return np.asarray(weights.numpy(), np.float64), denominator
