"""Presets: which advantage goes with which loss. A recipe's own keys win over those of the preset."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.train.correction import Correction
from hetero.train.losses import NO_CORRECTION, Aggregate, LossConfig


@dataclass(frozen=True)
class Algorithm:
    """An advantage and a loss that belong together.

    Attributes:
        advantage: a key of ADVANTAGES.
        loss: a key of the trainer's LOSSES.
        aggregate: how token losses become one number.
        clip_low, clip_high: clip of the probability ratio, for losses that have one.
        kl_coef: weight of the KL divergence from the base model.
        about: what it is, in one line.
    """

    advantage: str
    loss: str
    aggregate: Aggregate
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    about: str = ""

    def loss_config(
        self,
        *,
        max_tokens: int,
        clip_low: float | None = None,
        clip_high: float | None = None,
        kl_coef: float | None = None,
        off_policy: bool = False,
        correction: Correction = NO_CORRECTION,
    ) -> LossConfig:
        """The trainer's loss. `max_tokens`, the longest completion, is what dr_grpo divides by. `off_policy`:
        samples may come from an older policy, and REINFORCE, which is right for its own samples only, then
        weighs them by the probability ratio; where that is 1 the gradient is the same."""
        return LossConfig(
            kind="importance_sampling" if off_policy and self.loss == "reinforce" else self.loss,
            clip_low=self.clip_low if clip_low is None else clip_low,
            clip_high=self.clip_high if clip_high is None else clip_high,
            kl_coef=self.kl_coef if kl_coef is None else kl_coef,
            aggregate=self.aggregate,
            max_completion_tokens=max_tokens if self.aggregate == "dr_grpo" else None,
            correction=correction,
        )


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        "group_std",
        "ppo_clip",
        "token_mean",
        clip_high=0.28,
        about="GRPO as used today: advantage over the group's std, mean over all tokens, higher upper clip.",
    ),
    "grpo_paper": Algorithm(
        "group_std",
        "ppo_clip",
        "seq_mean_token_mean",
        kl_coef=0.04,
        about="GRPO as first published (arXiv 2402.03300): mean per sequence first, KL 0.04.",
    ),
    "dr_grpo": Algorithm(
        "group_mean",
        "ppo_clip",
        "dr_grpo",
        about="Dr. GRPO (arXiv 2503.20783): no division by std or by a sequence's own length.",
    ),
    "rloo": Algorithm(
        "rloo",
        "reinforce",
        "dr_grpo",
        about="RLOO (arXiv 2402.14740): REINFORCE, the mean of the others as baseline, sum per sequence.",
    ),
    "reinforce": Algorithm(
        "group_mean",
        "reinforce",
        "token_mean",
        about="REINFORCE with the group's mean as baseline, mean over all tokens.",
    ),
    "reinforce++": Algorithm(
        "batch_norm",
        "ppo_clip",
        "token_mean",
        about="REINFORCE++ (arXiv 2501.03262): rewards normalised over the batch, whatever their group.",
    ),
    "lite_ppo": Algorithm(
        "batch_std",
        "ppo_clip",
        "token_mean",
        about="Lite PPO (arXiv 2508.08221): group mean, std of the batch, mean over all tokens.",
    ),
    "maxrl": Algorithm(
        "maxrl",
        "reinforce",
        "token_mean",
        about="MaxRL (arXiv 2602.02710): advantage relative to the group's success rate.",
    ),
}
"""Name -> preset."""
