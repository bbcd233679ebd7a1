"""Numbers about one training batch, from per-token columns: token-weighted over the whole batch, never
means of means.

The columns are gathered over micro-batches and reduced once, in fp64, so no metric depends on how a batch
was cut.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats = npt.NDArray[np.float64]
MAX_LOG_RATIO = 20.0
MEANS = {
    "entropy": "entropy",
    "kl": "kl",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "dual_clip": "clip_ratio/dual_mean",
}
"""Column -> metric that is its token mean."""


class TokenLog:
    """Named per-token columns, grown one micro-batch at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, list[npt.NDArray[np.generic]]] = {}

    def add(self, columns: dict[str, Tensor]) -> None:
        """Append vectors [N] of one length; every call must bring the same names."""
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column.detach().cpu().numpy())

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """The whole column in its own dtype; empty when nothing was added."""
        return np.concatenate(self._parts[name]) if name in self._parts else np.empty(0, np.float32)


def loss_metrics(log: TokenLog, denominator: float) -> dict[str, float]:
    """loss, entropy, approx_kl (k3 of current against old policy), kl (to the reference), clip_ratio/*,
    old_logprobs_unknown.

    Columns read: loss, weights, entropy, logprobs, old_logprobs and, when there, kl, clip_low, clip_high,
    dual_clip. `denominator` as from `aggregate_weights`.
    """
    metrics = {"loss": 0.0}
    if "loss" in log:
        metrics["loss"] = float((_fp64(log, "loss") * _fp64(log, "weights")).sum() / denominator)
    if "logprobs" in log:
        old, new = _fp64(log, "old_logprobs"), _fp64(log, "logprobs")
        known = np.isfinite(old)
        metrics["old_logprobs_unknown"] = float((~known).sum())
        if known.any():
            metrics["approx_kl"] = float(_k3(new[known] - old[known]).mean())
    for column, name in MEANS.items():
        if column in log:
            metrics[name] = float(_fp64(log, column).mean())
    if "clip_low" in log:
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return metrics


def mismatch_of(*logs: TokenLog) -> dict[str, float]:
    """`mismatch_metrics` over the tokens marked "compared": computed under the version that sampled them.

    Each log numbers its own samples.
    """
    parts = []
    for log in logs:
        if "compared" in log:
            compared = log.column("compared").astype(bool)
            parts.append([log.column(name)[compared] for name in ("old_logprobs", "logprobs", "samples")])
    if not parts:
        return {}
    rollout, trained, samples = zip(*parts, strict=True)
    starts = np.cumsum([0, *(int(own.max(initial=-1)) + 1 for own in samples)])
    numbered = [own + start for own, start in zip(samples, starts, strict=False)]
    return mismatch_metrics(np.concatenate(rollout), np.concatenate(trained), np.concatenate(numbered))


def off_policy_of(log: TokenLog) -> dict[str, float]:
    """How far the policy being trained is from the one that sampled, over the trained tokens whose recorded
    log-probability is known.

    With r = trained / recorded probability: off_policy/ratio_mean, ratio_min, ratio_max; ess = (sum r)^2 /
    (N sum r^2), the share of the samples' worth that is left; kl_k3 = mean(r - 1 - log r). 1, 1, 1, 1 and 0
    for samples of the same policy on exact kernels.
    """
    if "logprobs" not in log:
        return {}
    old, new = _fp64(log, "old_logprobs"), _fp64(log, "logprobs")
    known = np.isfinite(old) & np.isfinite(new)
    if not known.any():
        return {}
    delta = new[known] - old[known]
    ratio = np.exp(delta.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    values = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ess": ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum()),
        "kl_k3": _k3(delta).mean(),
    }
    return {f"off_policy/{name}": float(value) for name, value in values.items()}


def mismatch_metrics(
    rollout: npt.NDArray[np.generic], trained: npt.NDArray[np.generic], samples: npt.NDArray[np.generic]
) -> dict[str, float]:
    """How far the trainer's log-probabilities are from those recorded while sampling; 0 everywhere on exact
    kernels.

    rollout, trained: [N] fp32 log-probabilities of the same tokens under the same adapter; samples: [N]
    int, whose token. With d = trained - rollout and r = e^d, means over tokens drawn from the rollout
    policy: kl_k1 = -mean d and kl_k3 = mean(r - 1 - d) estimate KL(rollout || trained);
    token_mult_prob_error = mean e^|d|; ppl_ratio = e^(-mean d); chi2_token = mean r^2 - 1, chi2_seq the
    same for products over a sample; ess = (sum r)^2 / (N sum r^2); is_mean, is_max, is_min of r;
    prob_pearson the correlation of the probabilities; tokens how many were compared. Tokens whose recorded
    value is not finite are left out and counted in nonfinite. Empty input: no metrics.
    """
    known = np.isfinite(rollout) & np.isfinite(trained)
    nonfinite = float((~known).sum())
    rollout, trained, samples = rollout[known], trained[known], samples[known]
    if not len(rollout):
        return {"mismatch/nonfinite": nonfinite} if nonfinite else {}
    delta = trained.astype(np.float64) - rollout.astype(np.float64)
    ratio = np.exp(delta.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    _, index = np.unique(samples, return_inverse=True)
    per_sample = np.bincount(index, weights=delta)
    values = {
        "logp_abs_max": np.abs(delta).max(),
        "logp_abs_mean": np.abs(delta).mean(),
        "logp_abs_p99": np.quantile(np.abs(delta), 0.99),
        "kl_k1": 0.0 - delta.mean(),
        "kl_k3": _k3(delta).mean(),
        "token_mult_prob_error": np.exp(np.abs(delta).clip(max=MAX_LOG_RATIO)).mean(),
        "ppl_ratio": np.exp(-delta.mean()),
        "chi2_token": np.square(ratio).mean() - 1,
        "chi2_seq": np.square(np.exp(per_sample.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))).mean() - 1,
        "ess": ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum()),
        "is_mean": ratio.mean(),
        "is_max": ratio.max(),
        "is_min": ratio.min(),
        "prob_pearson": _pearson(np.exp(rollout.astype(np.float64)), np.exp(trained.astype(np.float64))),
        "bitwise_equal_frac": (_bits(rollout) == _bits(trained)).mean(),
        "nonfinite": nonfinite,
        "tokens": len(delta),
    }
    return {f"mismatch/{name}": float(value) for name, value in values.items()}


def _fp64(log: TokenLog, name: str) -> Floats:
    return log.column(name).astype(np.float64)


def _k3(log_ratio: Floats) -> Floats:
    """k3 at tokens of the sampling policy, log_ratio = log other / sampling: r - 1 - log r."""
    clamped = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.exp(clamped) - 1 - clamped


def _pearson(x: Floats, y: Floats) -> float:
    """Correlation; 1 for equal vectors, also constant ones, and 0 when only one of them varies."""
    if np.array_equal(x, y):
        return 1.0
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt(np.square(x).sum() * np.square(y).sum())
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def _bits(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, np.float32).view(np.int32)
