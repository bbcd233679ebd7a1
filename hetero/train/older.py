"""Samples of older adapter versions: what the trainer makes of them under the version that sampled them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from hetero.models.lora import adapter_version
from hetero.models.versions import adapter_at, resident_versions
from hetero.train.batch import TrainSample, pack
from hetero.train.columns import SampleColumns
from hetero.train.metrics import TokenLog
from hetero.train.microstep import measure


def compare_older(
    model: PreTrainedModel,
    samples: Sequence[TrainSample],
    *,
    max_rows: int,
    context: float,
    temperature: float,
) -> list[TokenLog]:
    """One log for each older version that is still in memory: its samples' log-probabilities, computed again
    under it as they were sampled.

    Of each version one micro-batch of at most `max_rows` rows is computed, so that proving the arithmetic
    costs the same however large the batch is. Samples without recorded log-probabilities are left out.
    """
    logs = []
    for version in resident_versions(model):
        mine = [s for s in samples if s.adapter_version == version and s.logprobs is not None]
        if version == adapter_version(model) or not mine:
            continue
        columns = SampleColumns(mine, np.zeros(len(mine)), version)
        with adapter_at(model, version):
            for batch in pack(mine, max_rows, context=context)[:1]:
                log = TokenLog()
                log.add(measure(model, batch, columns, temperature))
                logs.append(log)
    return logs
