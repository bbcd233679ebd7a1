"""Per-token vectors of samples, flat over all their completion tokens, and their slices for a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hetero.errors import DataError
from hetero.train.batch import MicroBatch, TrainSample
from hetero.train.metrics import Floats


class SampleColumns:
    """What the loss and the metrics know about every completion token, trained or not.

    Args:
        samples [S]: the list that was given to `pack`.
        weights [S]: weight of one token of each sample.
        version: the adapter version about to be trained.
    """

    def __init__(self, samples: Sequence[TrainSample], weights: Floats, version: int) -> None:
        lengths = [len(sample.completion_ids) for sample in samples]
        self._start = torch.from_numpy(np.cumsum([0, *lengths])[:-1])
        current = [
            sample.logprobs is not None and sample.adapter_version in (None, version) for sample in samples
        ]
        self._columns = {
            "old_logprobs": _fp32([_known(s.logprobs, s) for s in samples]),
            "proximal_logprobs": _fp32([_known(s.proximal_logprobs, s) for s in samples]),
            "advantages": _fp32(
                [np.broadcast_to(s.advantage, n) for s, n in zip(samples, lengths, strict=True)]
            ),
            "weights": torch.from_numpy(np.repeat(weights, lengths).astype(np.float32)),
            "compared": torch.from_numpy(np.repeat(current, lengths)),
        }

    def take(self, batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
        """[N] each: old_logprobs, proximal_logprobs, advantages, weights; compared: recorded under the
        current adapter."""
        index = self._start[batch.samples] + batch.offsets
        return {name: column[index].to(device) for name, column in self._columns.items()}


def require_logprobs(samples: Sequence[TrainSample], loss: str) -> None:
    """Raises DataError when a sample comes without the log-probabilities that `loss` divides by."""
    for index, sample in enumerate(samples):
        if sample.logprobs is None:
            raise DataError(
                f"sample {index} has no logprobs, and {loss} needs those of the policy that sampled it. Pass "
                "Completion.logprobs, or Trainer.score() of the samples before the first update."
            )


def version_lag(samples: Sequence[TrainSample], version: int) -> dict[str, float]:
    """off_policy/version_lag_*: adapter updates between sampling and training, where samples tell."""
    lags = [version - sample.adapter_version for sample in samples if sample.adapter_version is not None]
    if not lags:
        return {}
    return {
        "off_policy/version_lag_mean": sum(lags) / len(lags),
        "off_policy/version_lag_max": float(max(lags)),
    }


def _known(logprobs: Sequence[float] | None, sample: TrainSample) -> Sequence[float]:
    return [np.nan] * len(sample.completion_ids) if logprobs is None else logprobs


def _fp32(parts: Sequence[Sequence[float] | Floats]) -> Tensor:
    arrays = [np.asarray(part, np.float32) for part in parts]
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.empty(0, np.float32))
