"""Sections `rl` and `eval`: what is sampled, how it is scored, what is learnt from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from hetero.recipe.sections.base import Section


class RewardSpec(Section):
    """One reward function and its weight in the sum."""

    function: str = Field(min_length=1)
    """A built-in name, `package.module:function` or `file.py:function`, with TRL's signature."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments passed to the function at every call."""
    per: Literal["sample", "group"] = "sample"
    """What one call scores: each completion as soon as it is there, or all of a prompt together."""
    name: str = ""
    """Name in the metrics; by default the function's."""


def _names_too(schema: dict[str, Any]) -> None:
    """In the JSON schema: a plain name stands for a spec with weight 1."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class RLSection(Section):
    """Rollouts, rewards and the loss."""

    rewards: list[RewardSpec] = Field(min_length=1, json_schema_extra=_names_too)
    """What is rewarded: names, or mappings of function, weight and options. Their weighted sum counts."""
    algorithm: str = "grpo"
    """Preset of advantage and loss."""
    group_size: int = Field(default=8, ge=1)
    """Completions sampled per prompt; they are each other's baseline."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts per step."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the loss uses the same. Rollouts always come from the full distribution (no
    top-p, top-k, min-p)."""
    stop: list[str] = Field(default=[])
    """Strings that end a completion."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip of the probability ratio, 1 - clip_low; by default the preset's."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip of the probability ratio, 1 + clip_high; by default the preset's."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL divergence from the base model (adapter off); by default the preset's."""
    max_staleness: int = Field(default=0, ge=0)
    """Updates between sampling and training. 0: every step samples with the newest adapter. n: answers are
    begun n steps ahead, so that generation need not wait for stragglers and rewards; n older versions of the
    adapter stay in memory, and the loss weighs by the probability ratio."""
    correction: Literal["none", "token_truncate", "token_mask", "sequence_mask", "geometric_mask"] = "none"
    """What is done about tokens that another policy sampled than the one that is trained (an older adapter,
    or kernels with other rounding). `none`: the loss takes its ratio, and its clip, to the policy that
    sampled. Else the loss takes it to the policy of now, and rho, the ratio of that one to the policy that
    sampled, becomes a weight: `token_truncate` min(rho, high); `token_mask` rho, 0 outside [low, high];
    `sequence_mask` drops answers whose product of rho is outside, `geometric_mask` those whose mean is."""
    correction_low: float | None = Field(default=None, ge=0, le=1)
    """Lower bound of `correction`: 0.5 for token_mask, 0 for sequence_mask, 0.98 for geometric_mask."""
    correction_high: float | None = Field(default=None, ge=1)
    """Upper bound of `correction`: 2 for token_truncate, 5 for token_mask, 3 for sequence_mask, 1.02 for
    geometric_mask."""
    routing_replay: Literal["auto", "on", "off"] = "auto"
    """Whether training selects the experts that sampling used, and computes only their weights anew: `auto`
    when another version of the adapter sampled the answer. One or two bytes per token, layer and expert."""
    train_truncated: bool = True
    """Learn from completions that reached `max_tokens`. Without, they only enter their group's mean."""
    reward_timeout: float = Field(default=30.0, gt=0)
    """Seconds that one call of a reward function may take; its samples then count as failed."""
    reward_workers: int = Field(default=1, ge=1)
    """Worker processes that run reward functions."""
    max_failed: float = Field(default=0.2, ge=0, le=1)
    """Share of a step's samples whose reward, or sampling for NaN in the logits, may fail; above it the run
    stops."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _names_are_specs(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            return [{"function": item} if isinstance(item, str) else item for item in value]
        return value


class EvalSection(Section):
    """Evaluation on the held-out tasks: before step 1, every `every` steps, and after the last."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 = only before the first and after the last."""
    prompts: int | None = Field(default=None, ge=1)
    """How many held-out tasks; by default all of them."""
    samples: int = Field(default=1, ge=1)
    """Completions per task; accuracy is the mean over all of them."""
    temperature: float = Field(default=1.0, ge=0)
    """0 = greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 = off."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 = off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the likeliest; 0 = off."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; by default `rl.max_tokens`."""
    correct_from: float = 1.0
    """A completion counts as correct when its reward reaches this."""
