"""Log-probabilities of whole samples, without a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hetero.train.batch import TrainSample, pack
from hetero.train.microstep import reference_logprobs
from hetero.train.policy import token_logprobs


@torch.no_grad()
def score(
    model: PreTrainedModel,
    samples: Sequence[TrainSample],
    *,
    max_rows: int,
    context: float,
    temperature: float,
    reference: bool = False,
) -> list[list[float]]:
    """See `Trainer.score`."""
    scores = [[math.nan] * len(sample.completion_ids) for sample in samples]
    for batch in pack(samples, max_rows, context=context, every_token=True):
        if reference:
            logprobs = reference_logprobs(model, batch, temperature)
        else:
            logprobs, _ = token_logprobs(model, batch, temperature)
        for sample, offset, value in zip(
            batch.samples.tolist(), batch.offsets.tolist(), logprobs.tolist(), strict=True
        ):
            scores[sample][offset] = value
    return scores
