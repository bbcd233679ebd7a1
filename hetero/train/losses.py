"""Token losses as pure functions, and how token losses become one number.

A loss maps LossInputs, vectors over the trained tokens of one micro-batch, to LossOutputs. Nothing here
knows about models, packing or micro-batches: the sum over micro-batches of `loss`, divided once by the
denominator of `aggregate_weights`, is the loss of the whole optimizer batch, however it was cut.

Notation: p the policy being trained, q the policy that sampled (`old_logprobs`; with a correction the one
from which the update starts), A the advantage, r = p / q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from hetero.errors import ArgumentError
from hetero.train.correction import Correction, correction_weights

NO_CORRECTION = Correction()

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is far outside any clip range and its square still fits
fp32.
"""

Aggregate = Literal["token_mean", "seq_mean_token_mean", "dr_grpo", "prompt_mean"]


@dataclass(frozen=True)
class LossConfig:
    """What is minimised. `kind` is a key of LOSSES; see there and `aggregate_weights` for the formulas.

    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: bound c > 1 on r for A < 0 (Ye et al., arXiv 1912.09729), None for no bound.
    kl_coef: coefficient of k3(p, reference); the reference is the base model, that is the model without its
        adapter.
    max_completion_tokens: the constant length L of aggregate "dr_grpo".
    correction: weights of tokens that another policy sampled. They multiply the token loss and not the KL
        term; masked tokens stay in the denominator.
    """

    kind: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coef: float = 0.0
    aggregate: Aggregate = "token_mean"
    max_completion_tokens: int | None = None
    correction: Correction = NO_CORRECTION

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ArgumentError(f"loss is {self.kind!r}; expected one of {', '.join(LOSSES)}")
        if self.aggregate not in get_args(Aggregate):
            raise ArgumentError(
                f"aggregate is {self.aggregate!r}; expected one of {', '.join(get_args(Aggregate))}"
            )
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ArgumentError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}; expected clip_low in [0, 1], "
                "clip_high >= 0"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ArgumentError(
                f"dual_clip is {self.dual_clip}; expected a number above 1 (3 is usual) or none"
            )
        if not 0 <= self.kl_coef < float("inf"):
            raise ArgumentError(f"kl_coef is {self.kl_coef}; expected 0 or more")
        if self.aggregate == "dr_grpo" and not self.max_completion_tokens:
            raise ArgumentError("aggregate dr_grpo divides by a constant length: set max_completion_tokens")
        if self.correction.active and self.is_supervised:
            raise ArgumentError(
                f"correction is {self.correction.mode}, but {self.kind} learns tokens that no policy sampled"
            )

    @property
    def is_supervised(self) -> bool:
        """Whether the tokens come from a data set, so that having none to train is a mistake."""
        return self.kind == "sft"

    @property
    def uses_ratio(self) -> bool:
        """Whether the log-probabilities recorded while sampling are read."""
        return self.kind in ("ppo_clip", "importance_sampling") or self.correction.active

    @property
    def uses_advantages(self) -> bool:
        """Whether a token with advantage zero adds nothing, so that a group without spread can be skipped."""
        return not self.is_supervised and self.kl_coef == 0.0


@dataclass(frozen=True)
class LossInputs:
    """Vectors [N] over trained tokens, fp32. `logprobs` carries the gradient, at the sampling temperature.

    old_logprobs: under the policy that sampled; a value that is not finite means unknown and gives ratio 1.
    weights: share of each token in the sum, from `aggregate_weights`.
    ref_logprobs: under the reference, needed when kl_coef > 0.
    proximal_logprobs: under the policy from which the update starts, read with a correction; a value that is
        not finite (None: all of them) stands for the policy being trained.
    samples: [N] int64, whose token; needed by corrections that look at whole samples.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    samples: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """`loss`: scalar sum of weights * token losses; `tokens`: detached [N] diagnostics, "loss" always, with a
    correction its weights as "correction".
    """

    loss: Tensor
    tokens: dict[str, Tensor]


TokenLoss = Callable[[LossInputs, LossConfig], tuple[Tensor, dict[str, Tensor]]]


def log_ratio(inputs: LossInputs) -> Tensor:
    """log r [N], clamped; zero with gradient (r = 1) where the old log-probability is unknown."""
    old = torch.where(torch.isfinite(inputs.old_logprobs), inputs.old_logprobs, inputs.logprobs.detach())
    return (inputs.logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 at most dual_clip * |A| (arXiv
    1707.06347, 2503.14476).

    Diagnostics: "clip_low", "clip_high" mark tokens whose gradient the clip removed, "dual_clip" the dual
        clip's.
    """
    ratio = log_ratio(inputs).exp()
    advantages = inputs.advantages
    low = (advantages < 0) & (ratio < 1 - config.clip_low)
    high = (advantages > 0) & (ratio > 1 + config.clip_high)
    bounded = torch.where(low | high, ratio.clamp(1 - config.clip_low, 1 + config.clip_high).detach(), ratio)
    diagnostics = {"clip_low": low, "clip_high": high}
    if config.dual_clip is not None:
        dual = (advantages < 0) & (ratio > config.dual_clip)
        bounded = torch.where(dual, torch.full_like(ratio, config.dual_clip), bounded)
        diagnostics["dual_clip"] = dual
    return -bounded * advantages, diagnostics


def reinforce(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p: the score-function gradient, exact only for samples of the current policy."""
    return -inputs.advantages * inputs.logprobs, {}


def importance_sampling(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-r A, unclipped: the policy gradient for samples of an older policy, token by token."""
    return -log_ratio(inputs).exp() * inputs.advantages, {}


def sft(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p: negative log-likelihood; advantages and old log-probabilities are not read."""
    return -inputs.logprobs, {}


LOSSES: dict[str, TokenLoss] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
    "importance_sampling": importance_sampling,
    "sft": sft,
}
"""Name -> token loss."""


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's non-negative estimate of KL(p || ref) at tokens of p: e^d - d - 1 with d = log ref/p."""
    delta = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return delta.exp() - delta - 1


def compute_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The configured token loss, corrected, plus kl_coef * k3, weighted and summed."""
    factor = None
    if config.correction.active:
        inputs, factor = _decoupled(inputs, config.correction)
    token_loss, diagnostics = LOSSES[config.kind](inputs, config)
    if factor is not None:
        token_loss = factor * token_loss
        diagnostics["correction"] = factor
    if config.kl_coef:
        if inputs.ref_logprobs is None:
            raise ValueError("kl_coef > 0 needs ref_logprobs")
        kl = k3(inputs.logprobs, inputs.ref_logprobs)
        diagnostics["kl"] = kl
        token_loss = token_loss + config.kl_coef * kl
    diagnostics["loss"] = token_loss
    return LossOutputs((inputs.weights * token_loss).sum(), {k: v.detach() for k, v in diagnostics.items()})


def _decoupled(inputs: LossInputs, correction: Correction) -> tuple[LossInputs, Tensor]:
    """Inputs whose ratio is to the policy from which the update starts, and the weights for the rest."""
    proximal = now = inputs.logprobs.detach()
    if inputs.proximal_logprobs is not None:
        proximal = torch.where(torch.isfinite(inputs.proximal_logprobs), inputs.proximal_logprobs, now)
    factor = correction_weights(correction, inputs.old_logprobs, proximal, inputs.samples)
    return replace(inputs, old_logprobs=proximal), factor


def aggregate_weights(counts: Tensor, groups: Tensor, config: LossConfig) -> tuple[Tensor, float]:
    """How much one token of each sample weighs, and the denominator of the sum.

    counts [S] int64: trained tokens of each sample, none zero; groups [S] int64: group of each sample.
    Returns weights [S] fp64 and a denominator that adds up over disjoint sets of groups, which is what
    makes gradients independent of how a batch is cut into calls and micro-batches:

    token_mean            1 / tokens of the batch                      (DAPO, arXiv 2503.14476)
    seq_mean_token_mean   1 / (tokens of the sample * samples)         (GRPO, arXiv 2402.03300)
    dr_grpo               1 / (max_completion_tokens * samples)        (arXiv 2503.20783)
    prompt_mean           1 / (tokens of the group * groups)           (ScaleRL, arXiv 2510.13786)
    """
    ones = torch.ones(len(counts), dtype=torch.float64)
    if config.aggregate == "token_mean":
        return ones, float(counts.sum())
    if config.aggregate == "seq_mean_token_mean":
        return ones / counts, float(len(counts))
    if config.aggregate == "dr_grpo":
        return ones / float(config.max_completion_tokens or 1), float(len(counts))
    _, index = torch.unique(groups, return_inverse=True)
    tokens = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.int64).index_add_(
        0, index, counts
    )
    return ones / tokens[index], float(len(tokens))
