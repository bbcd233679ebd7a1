"""What separates two recipes: a run can only be resumed with the one that it was started with."""

from __future__ import annotations

from typing import Any

from hetero.recipe.recipe import Recipe

_FREE = ("log.", "engine.", "train.save_every", "train.keep_checkpoints", "model.threads")
"""Keys that change what is kept or how fast it goes, never a result."""


def differences(old: Recipe, new: Recipe) -> list[str]:
    """`key: old -> new` for every difference that would make the resumed run another one.

    `train.steps` may grow: only the learning rate of a schedule that ends at the last step depends on it.
    """
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    found = []
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) == after.get(key) or key.startswith(_FREE):
            continue
        if key == "train.steps" and new.train.steps > old.train.steps and new.train.schedule == "constant":
            continue
        found.append(f"{key}: {before.get(key)!r} -> {after.get(key)!r}")
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
    return {prefix[:-1]: value}
