"""Weights for tokens that another policy sampled than the one that an update starts from.

Three policies: mu sampled a token, q is the one from which an update starts, p the one being trained. Without
a correction losses take p / mu. With one they take p / q and every token loss is multiplied with a weight
w(rho), rho = q / mu, that has no gradient (decoupled: Hilton et al., arXiv 2110.00641). Where mu and q agree
bit for bit, rho is exactly 1 and so is every weight.

token_truncate    min(rho, high): Ionides 2008, and the token-level TIS of verl, slime and SkyRL, which take 2
token_mask        rho, 0 outside [low, high]: IcePop (arXiv 2510.18855) with 0.5 and 5
sequence_mask     1, 0 for all tokens of a sample whose product of rho is outside [low, high]: TRL's default,
                  with 3 and no lower bound. The longer a sample the likelier it is dropped, which
                  mismatch/masked_by_length shows
geometric_mask    1, 0 for all tokens of a sample whose geometric mean of rho is outside [low, high]: no such
                  trap. SkyRL takes 0.99 and 1.01; routers that flip need more, here 0.98 and 1.02
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hetero.errors import ArgumentError
from hetero.train.metrics import Floats, TokenLog

CorrectionMode = Literal["none", "token_truncate", "token_mask", "sequence_mask", "geometric_mask"]

BOUNDS: dict[str, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "token_truncate": (0.0, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.0, 3.0),
    "geometric_mask": (0.98, 1.02),
}
"""Mode -> its usual (low, high)."""
_MAX_LOG_RATIO = 20.0  # as in losses: e^20 is outside any bounds, and fits fp32


@dataclass(frozen=True)
class Correction:
    """How tokens are weighted. low, high: bounds of what the mode bounds; None for the usual ones.

    Raises ArgumentError for an unknown mode and for bounds that it cannot use.
    """

    mode: CorrectionMode = "none"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(CorrectionMode):
            raise ArgumentError(
                f"correction is {self.mode!r}; expected one of {', '.join(get_args(CorrectionMode))}"
            )
        if not self.active and (self.low, self.high) != (None, None):
            raise ArgumentError(
                f"correction_low is {self.low} and correction_high {self.high}, but correction none has no "
                f"bounds; name one of {', '.join(get_args(CorrectionMode)[1:])}"
            )
        if self.mode == "token_truncate" and self.low is not None:
            raise ArgumentError(
                f"correction_low is {self.low}, but token_truncate only has an upper bound; take token_mask "
                "to drop tokens that have become unlikely"
            )
        low, high = self.bounds
        if not (0 <= low < high and (low <= 1 <= high)):
            raise ArgumentError(
                f"correction_low is {low} and correction_high {high}; expected 0 <= low <= 1 <= high and "
                "low < high, or every sample of the newest policy would be dropped"
            )

    @property
    def active(self) -> bool:
        """Whether there is one."""
        return self.mode != "none"

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high)."""
        low, high = BOUNDS[self.mode]
        return low if self.low is None else self.low, high if self.high is None else self.high


@torch.no_grad()
def correction_weights(
    correction: Correction, sampled: Tensor, proximal: Tensor, samples: Tensor | None = None
) -> Tensor:
    """w [N] fp32, without gradient; see the head of this module.

    Args:
        sampled: [N] log mu; a value that is not finite is unknown, and rho is 1 there.
        proximal: [N] log q, finite.
        samples: [N] int64, whose token; needed by the modes that look at whole samples. All trained tokens
            of a sample must be there.
    """
    delta = torch.where(torch.isfinite(sampled), proximal.double() - sampled.double(), 0.0)
    low, high = correction.bounds
    if correction.mode in ("token_truncate", "token_mask"):
        ratio = delta.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        weights = ratio.clamp(max=high) if correction.mode == "token_truncate" else _within(ratio, low, high)
        return weights.float()
    if not correction.active:
        return torch.ones_like(sampled)
    assert samples is not None, "a mask over samples needs to know whose tokens they are"
    # On the CPU, token after token: a sum whose bits depend on nothing but the sample's own tokens.
    index = samples.cpu()
    total = torch.bincount(index, weights=delta.cpu())
    if correction.mode == "geometric_mask":
        total /= torch.bincount(index, weights=torch.isfinite(sampled).double().cpu()).clamp(min=1)
    kept = (total >= _log(low)) & (total <= _log(high))
    return kept[index].float().to(sampled.device)


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def correction_metrics(log: TokenLog) -> dict[str, float]:
    """What the correction took away, over all trained tokens of a batch; 0, 0, 0 and 1 without one.

    mismatch/masked_token_frac: share of the tokens with weight 0. masked_seq_frac: share of the samples
    none of whose tokens is left. correction_mean: mean weight of a token. masked_by_length: with f the masked
    share of a sample's tokens, mean f over the longer half of the samples divided by mean f over all: 1
    when long and short answers are masked alike, 2 when only long ones are (the trap of sequence_mask), 0
    when only short ones are, or nothing is. Samples of the median length belong to both halves in equal
    parts, so that neither their order nor an odd number matters.
    """
    weights = log.column("correction").astype(np.float64)
    if not len(weights):
        return _named(0.0, 0.0, 0.0, 1.0)
    masked = weights == 0
    _, index, lengths = np.unique(log.column("samples"), return_inverse=True, return_counts=True)
    shares = np.bincount(index.reshape(-1), weights=masked) / lengths
    by_length = float((shares * _long_half(lengths)).sum() * 2 / shares.sum()) if shares.any() else 0.0
    return _named(masked.mean(), (shares == 1).mean(), by_length, weights.mean())


def _named(tokens: float, sequences: float, by_length: float, mean: float) -> dict[str, float]:
    return {
        "mismatch/masked_token_frac": float(tokens),
        "mismatch/masked_seq_frac": float(sequences),
        "mismatch/masked_by_length": by_length,
        "mismatch/correction_mean": float(mean),
    }


def _long_half(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """How much of each sample [S] belongs to the longer half; adds up to S / 2."""
    median = np.median(lengths)
    above, at = lengths > median, lengths == median
    part: Floats = above.astype(np.float64)
    if at.any():
        part[at] = (len(lengths) / 2 - above.sum()) / at.sum()
    return part
