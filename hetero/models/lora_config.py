"""What a LoRA adapter covers: the recipe's `lora` section, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.errors import ModelError

GROUPS = ("attention", "mlp", "experts")
"""Named targets: attention projections; dense and shared feed-forward layers; routed experts."""

LAYOUTS = ("shared_outer", "per_expert")


@dataclass(frozen=True)
class LoraConfig:
    """What to adapt and how.

    Attributes:
        rank: rank of every factor pair.
        alpha: the update is scaled by alpha / rank.
        targets: "attention", "mlp" (dense and shared feed-forward layers), "experts" (routed experts); or
            regular expressions that match whole module names, where the projections of an experts module
            are called gate_proj, up_proj and down_proj. Router and LM head are adapted only when an
            expression names them.
        expert_layout: "shared_outer" shares the factor on the hidden side among the experts of a layer;
            "per_expert" gives every expert its own pair.
        expert_rank: rank on the experts, whose updates are then scaled by alpha / expert_rank; None: `rank`.
        dropout: must be 0. With dropout the trained policy would not be the one that was sampled from.

    Raises: ModelError for values that make no sense.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Sequence[str] = GROUPS
    expert_layout: str = "shared_outer"
    expert_rank: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        object.__setattr__(self, "targets", tuple(self.targets))
        ranks = [rank for rank in (self.rank, self.expert_rank) if rank is not None]
        if not all(isinstance(rank, int) and rank >= 1 for rank in ranks):
            raise ModelError(
                f"LoRA ranks must be whole numbers of at least 1, got rank={self.rank}, "
                f"expert_rank={self.expert_rank}"
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ModelError(f"LoRA alpha must be a positive number, got {self.alpha}")
        if not self.targets:
            raise ModelError(
                f"LoRA targets are empty; name some of {', '.join(GROUPS)}, or drop the LoRA section"
            )
        if self.expert_layout not in LAYOUTS:
            raise ModelError(f"expert_layout={self.expert_layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.dropout != 0:
            raise ModelError(
                f"LoRA dropout must be 0, got {self.dropout}: sampler and trainer share one policy"
            )
