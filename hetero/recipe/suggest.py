"""What the user may have meant by a key that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hetero.recipe.source import Key

ELSEWHERE = {
    "learning_rate": "train.lr",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "lr_scheduler_type": "train.schedule",
    "max_steps": "train.steps",
    "gradient_checkpointing": "train.checkpointing",
    "save_steps": "train.save_every",
    "num_generations": "rl.group_size",
    "max_completion_length": "rl.max_tokens",
    "max_new_tokens": "rl.max_tokens",
    "reward_funcs": "rl.rewards",
    "reward_weights": "rl.rewards",
    "beta": "rl.kl_coef",
    "epsilon": "rl.clip_low",
    "epsilon_high": "rl.clip_high",
    "vllm_importance_sampling_correction": "rl.correction",
    "vllm_importance_sampling_mode": "rl.correction",
    "vllm_importance_sampling_cap": "rl.correction_high",
    "eval_steps": "eval.every",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "dataset_name": "data.train",
    "dataset": "data.train",
    "lora_alpha": "lora.alpha",
    "lora_rank": "lora.rank",
    "lora_r": "lora.rank",
    "r": "lora.rank",
    "target_modules": "lora.targets",
}
"""Names that other libraries use -> ours."""

_FULL_DISTRIBUTION = (
    "Rollouts are drawn from the full distribution, so that their log-probabilities are those that the loss "
    "differentiates; remove the key (eval has it)."
)
EXPLAINED: dict[Key, str] = {
    ("rl", "top_p"): _FULL_DISTRIBUTION,
    ("rl", "top_k"): _FULL_DISTRIBUTION,
    ("rl", "min_p"): _FULL_DISTRIBUTION,
    (
        "lora",
        "dropout",
    ): "Dropout would make the trained policy another one than the sampled one; remove the key.",
    (
        "model",
        "dtype",
    ): "Activations are bf16 and adapters fp32; remove the key, or set model.experts and model.dense.",
}
"""Keys that people look for and that are left out on purpose -> why."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The nearest of `known` to `name`, if any is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(recipe: type[BaseModel], key: Key) -> str:
    """A sentence for the unknown `key`: why it is left out, the nearest existing one, or which exist in its
    place."""
    if key in EXPLAINED:
        return EXPLAINED[key]
    leaf = str(key[-1])
    siblings = list(known_keys(recipe, key[:-1]) or ())
    prefix = ".".join(map(str, key[:-1]))
    paths = list(all_paths(recipe))
    meant = (
        ELSEWHERE.get(leaf.removeprefix("--"))
        or " or ".join(path for path in paths if path.rsplit(".", 1)[-1] == leaf)
        or ".".join(filter(None, (prefix, nearest(leaf, siblings) or "")))
    )
    if meant == prefix:
        leaves = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
        meant = leaves.get(nearest(leaf, leaves) or "", "")
    if meant:
        return f"Did you mean {meant}?"
    where = f"Keys of {prefix}" if prefix else "Sections"
    return f"{where}: {', '.join(siblings)}." if siblings else f"{prefix} has no keys."


def known_keys(recipe: type[BaseModel], key: Key) -> dict[str, FieldInfo] | None:
    """The fields of the mapping at `key`, or None if that is no mapping with fixed keys."""
    model: type[BaseModel] | None = recipe
    for part in key:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model is not None else None
        model = _model(field.annotation) if field is not None else None
    return dict(model.model_fields) if model is not None else None


def all_paths(recipe: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the recipe, in order; keys of list items are left out."""
    for name, field in recipe.model_fields.items():
        yield prefix + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from all_paths(inner, f"{prefix}{name}.")


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _model(arg)) is not None), None)
