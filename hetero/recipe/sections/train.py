"""Sections `train` and `log`: the optimiser, the steps, what is kept of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from hetero.recipe.sections.base import Section


class TrainSection(Section):
    """The optimiser and the run's length. One step is one batch of rollouts and one update."""

    steps: int = Field(ge=1)
    """Optimiser steps of the whole run."""
    lr: float = Field(default=3e-5, gt=0)
    """Peak learning rate of AdamW on the fp32 LoRA masters."""
    betas: list[float] = Field(default=[0.9, 0.95])
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient of all LoRA parameters together is scaled down to this norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0 at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens per forward and backward; sets the memory of activations. Does not change the gradient."""
    checkpointing: Literal["layer", "none"] = "layer"
    """`layer` recomputes each layer in backward instead of keeping its activations. Does not change the
    gradient."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything: adapter init, order of the data, sampling."""
    save_every: int = Field(default=1, ge=1)
    """A checkpoint every so many steps, and after the last; `--resume` goes on from the newest one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""

    @field_validator("betas")
    @classmethod
    def _two_rates(cls, value: list[float]) -> list[float]:
        if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"is {value}, but must be two numbers, each at least 0 and under 1.")
        return value


class LogSection(Section):
    """What the run shows and keeps."""

    completions: int | None = Field(default=None, ge=0)
    """Completions per step that `completions.jsonl` keeps; by default all of them."""
    samples: int = Field(default=2, ge=0)
    """Completions per step that are shown while the run goes."""
    report: bool = True
    """Write `report.html` when the run ends."""
