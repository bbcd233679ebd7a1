"""Which modules of a model a LoRA target reaches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from hetero.errors import ModelError
from hetero.models.experts import HeteroExperts
from hetero.models.linear import HeteroLinear
from hetero.models.lora_config import GROUPS

PROJECTIONS = ("gate", "up", "down")
"""Projections of an expert; as a target, projection p of the experts module `m` is called `m.p_proj`."""

_ATTENTION = {"self_attn", "attn", "attention", "self_attention", "linear_attn"}
_MLP = {
    "mlp",
    "feed_forward",
    "ffn",
    "shared_expert",
    "shared_experts",
    "shared_mlp",
    "block_sparse_moe",
    "moe",
}
# Parts of a name that are never meant by a group: what chooses or weighs experts, and towers that read no
# text.
_NEVER = {
    "router",
    "gate",
    "wg",
    "shared_expert_gate",
    "visual",
    "vision_tower",
    "vision_model",
    "audio_tower",
}

Sites = dict[str, tuple[str, ...]]
"""Module name -> the projections to adapt (experts), or () for a linear layer. In the order of the model."""


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> every linear layer that can carry LoRA."""
    kinds = (nn.Linear, HeteroLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) features of a linear layer."""
    assert isinstance(module, (nn.Linear, HeteroLinear)), type(module)
    return module.out_features, module.in_features


def expert_modules(model: nn.Module) -> dict[str, HeteroExperts]:
    """Name -> every module of routed experts."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HeteroExperts)}


def find_sites(model: nn.Module, targets: Sequence[str], lenient: bool) -> Sites:
    """Resolve targets to modules.

    Args:
        targets: names of `GROUPS`, or regular expressions that match a whole module name, e.g.
            `.*self_attn\\.(q|v)_proj`, `.*experts\\.down_proj`.
        lenient: a target may reach nothing as long as another reaches something.

    Raises:
        ModelError: a target reaches nothing, or is not a regular expression.
    """
    linears, experts = linear_modules(model), expert_modules(model)
    wanted: dict[str, set[str]] = {}
    idle = []
    for target in targets:
        reached = _group(target, linears, experts) if target in GROUPS else _match(target, linears, experts)
        if not reached:
            idle.append(target)
        for name, projection in reached:
            wanted.setdefault(name, set()).update({projection} - {""})
    if idle and not (lenient and wanted):
        raise ModelError(_nothing_there(idle, model, linears, experts))
    order = [name for name, _ in model.named_modules() if name in wanted]
    return {name: tuple(p for p in PROJECTIONS if p in wanted[name]) for name in order}


def _group(
    group: str, linears: dict[str, nn.Module], experts: dict[str, HeteroExperts]
) -> list[tuple[str, str]]:
    if group == "experts":
        return [(name, projection) for name in experts for projection in PROJECTIONS]
    reached = []
    for name in linears:
        parts = set(name.split("."))
        kind = "attention" if parts & _ATTENTION else "mlp" if parts & _MLP else ""
        if kind == group and not parts & _NEVER:
            reached.append((name, ""))
    return reached


def _match(
    target: str, linears: dict[str, nn.Module], experts: dict[str, HeteroExperts]
) -> list[tuple[str, str]]:
    try:
        pattern = re.compile(target)
    except re.error as error:
        raise ModelError(
            f"LoRA target {target!r} is neither one of {', '.join(GROUPS)} nor a regular expression: {error}"
        ) from error
    reached = [(name, "") for name in linears if pattern.fullmatch(name)]
    for name in experts:
        reached += [(name, p) for p in PROJECTIONS if pattern.fullmatch(f"{name}.{p}_proj")]
    return reached


def _nothing_there(
    idle: list[str], model: nn.Module, linears: dict[str, nn.Module], experts: dict[str, HeteroExperts]
) -> str:
    names = [*linears, *(f"{name}.{p}_proj" for name in experts for p in PROJECTIONS)]
    kinds = sorted({re.sub(r"\d+", "*", name) for name in names})
    unpacked = any(hasattr(module, "is_transposed") for module in model.modules())
    hint = " Its experts are not packed: load it with hetero.load_model() to adapt them." if unpacked else ""
    return (
        f"LoRA target {', '.join(map(repr, idle))} reaches no module of {type(model).__name__}. Targets are "
        f"{', '.join(GROUPS)}, or a regular expression that matches a whole name; this model has "
        f"{', '.join(kinds)}.{hint}"
    )
