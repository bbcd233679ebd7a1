"""hetero: post-train Mixture-of-Experts language models on one box.

The public names are loaded when they are first used, so that `import hetero` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero.engine.engine import Engine
    from hetero.engine.params import SamplingParams
    from hetero.models.config import HeteroConfig
    from hetero.models.load import load_model
    from hetero.models.lora_config import LoraConfig
    from hetero.recipe.recipe import Recipe
    from hetero.sandbox.sandbox import Sandbox
    from hetero.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "HeteroConfig",
    "LoraConfig",
    "Recipe",
    "SamplingParams",
    "Sandbox",
    "Trainer",
    "load_model",
]

_HOMES = {
    "Engine": "hetero.engine.engine",
    "HeteroConfig": "hetero.models.config",
    "LoraConfig": "hetero.models.lora_config",
    "Recipe": "hetero.recipe.recipe",
    "SamplingParams": "hetero.engine.params",
    "Sandbox": "hetero.sandbox.sandbox",
    "Trainer": "hetero.train.trainer",
    "load_model": "hetero.models.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'hetero' has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
