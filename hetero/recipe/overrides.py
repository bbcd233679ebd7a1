"""Overrides from the command line: `train.lr=1e-4 rl.rewards.0.weight=2`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import yaml

from hetero.errors import RecipeError
from hetero.recipe.source import Key, Source, scalar


def apply(source: Source, overrides: Iterable[str]) -> Source:
    """A new source with every `key.sub=value` set. Values are typed as in YAML: `1e-4`, `true`, `[a, b]`,
    `null`."""
    result = Source(source.name, copy.deepcopy(source.data), dict(source.where))
    for text in overrides:
        path, equals, value = text.partition("=")
        parts = path.strip().split(".")
        if not equals or not all(parts):
            raise RecipeError(
                f"The override {text!r} is not of the form key.sub=value, such as train.lr=1e-4."
            )
        try:
            typed = scalar(value)
        except yaml.YAMLError:
            raise RecipeError(
                f"The value of the override {text!r} is not valid YAML. Quote it for the shell and for "
                f"YAML: {path}='\"...\"'."
            ) from None
        _assign(result, parts, typed, text)
    return result


def _assign(source: Source, parts: list[str], value: Any, text: str) -> None:
    place = f"override {text}"
    node: Any = source.data
    key: Key = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        index: str | int = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise RecipeError(
                    f"{place}: {'.'.join(parts[:depth])} is a list of {len(node)}, so {part!r} must be a "
                    f"number under {len(node)}."
                )
            index = int(part)
        elif not isinstance(node, dict):
            raise RecipeError(
                f"{place}: {'.'.join(parts[:depth])} is {node!r}, which has no keys: set it as a whole."
            )
        key = (*key, index)
        if last:
            for inner in [k for k in source.where if k[: len(key)] == key]:
                del source.where[inner]
            node[index] = value
            source.where[key] = place
            return
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
            source.where[key] = place
        node = node[index]
