"""Our LoRA factors in PEFT's terms: what it targets, at which rank, and the tensors it expects.

PEFT adapts fused expert weights as parameters. For a parameter of E experts it keeps one pair of matrices, A
[E * R, in] with the experts outermost and B [out, R * E] with the experts innermost; the update of expert e
is B_e A_e. (So since PEFT 0.20; before, A and B changed places.) The fused gate/up parameter takes our two
pairs as blocks: A stacks them along the rank, B is block-diagonal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hetero.kernels.ops import LoraFactors
from hetero.models.lora import lora_factors
from hetero.models.lora_targets import expert_modules, linear_modules

if TYPE_CHECKING:
    from hetero.experts import ExpertLayout
    from hetero.kernels.ops import ExpertLoraFactors

# On a model with fused experts PEFT takes these module names for the experts' own, wherever they stand, so
# a linear layer of such a name is targeted through its weight parameter instead.
_TAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


@dataclass(frozen=True)
class PeftPair:
    """One target of PEFT: a module, or a parameter of one.

    Attributes:
        target: full name of the module or parameter.
        is_parameter: which of the two.
        key: the state dict keys are `base_model.model.{key}.lora_A.weight` and `...lora_B.weight`.
        rank, scale: rank of the pair, and the factor on B A.
        a_shape, b_shape, a, b: shapes of the two tensors, and how to make them.
    """

    target: str
    is_parameter: bool
    key: str
    rank: int
    scale: float
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    a: Callable[[], Tensor]
    b: Callable[[], Tensor]


def peft_pairs(model: nn.Module) -> list[PeftPair]:
    """Every LoRA factor pair of the model, in its order."""
    experts = expert_modules(model)
    pairs: list[PeftPair] = []
    for name, factors in lora_factors(model).items():
        if isinstance(factors, LoraFactors):
            pairs.append(_linear_pair(name, factors, bool(experts) and name.rpartition(".")[2] in _TAKEN))
        else:
            pairs += _expert_pairs(name, experts[name].layout, factors)
    return pairs


def peft_config(model: nn.Module, pairs: list[PeftPair], base: str) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    modules = [pair for pair in pairs if not pair.is_parameter]
    parameters = [pair for pair in pairs if pair.is_parameter]
    module_names = _short_names([p.target for p in modules], [n for n, _ in model.named_modules()], "leaf")
    every_parameter = [f"{n}.weight" for n in linear_modules(model)]
    every_parameter += [f"{n}.{p}" for n in expert_modules(model) for p in ("gate_up_proj", "down_proj")]
    parameter_names = _short_names([p.target for p in parameters], every_parameter, "in_layer")
    rank, scale = Counter((pair.rank, pair.scale) for pair in pairs).most_common(1)[0][0]
    names = {**module_names, **parameter_names}
    ranks = _patterns({pair.target: pair.rank for pair in pairs}, names, rank)
    alphas = _patterns({pair.target: pair.scale * pair.rank for pair in pairs}, names, scale * rank)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(set(module_names.values())),
        "target_parameters": sorted(set(parameter_names.values())) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "peft_version": "0.20.0",
    }


def _linear_pair(name: str, lora: LoraFactors, taken: bool) -> PeftPair:
    return PeftPair(
        target=f"{name}.weight" if taken else name,
        is_parameter=taken,
        key=name,
        rank=lora.a.shape[0],
        scale=lora.scale,
        a_shape=(lora.a.shape[0], lora.a.shape[1]),
        b_shape=(lora.b.shape[0], lora.b.shape[1]),
        a=lambda: lora.a,
        b=lambda: lora.b,
    )


def _expert_pairs(name: str, at: ExpertLayout, lora: ExpertLoraFactors) -> list[PeftPair]:
    assert lora is not None
    e, h, i = at.num_experts, at.hidden_size, at.intermediate_size
    sides = [(p, getattr(lora, f"{p}_a"), getattr(lora, f"{p}_b")) for p in ("gate", "up", "down")]
    gate_up = [(p == "up", a, b) for p, a, b in sides[:2] if a is not None]
    down = [(a, b) for _, a, b in sides[2:] if a is not None]
    pairs = []
    if gate_up:
        rank = sum(a.shape[-2] for _, a, _ in gate_up)
        # PEFT nests one wrapper per parameter; the one around gate_up_proj is the inner one.
        key = f"{name}.base_layer" if down else name
        shapes = (e * rank, h), (2 * i, rank * e)
        make = partial(_gate_up_a, gate_up, e), partial(_gate_up_b, gate_up, e, i, at.interleaved)
        pairs.append(PeftPair(f"{name}.gate_up_proj", True, key, rank, lora.scale, *shapes, *make))
    for a, b in down:
        rank = a.shape[-2]
        shapes = (e * rank, i), (h, rank * e)
        make = partial(_experts_outermost, a), partial(_experts_innermost, b, e)
        pairs.append(PeftPair(f"{name}.down_proj", True, name, rank, lora.scale, *shapes, *make))
    return pairs


def _gate_up_a(sides: list[tuple[bool, Tensor, Tensor]], e: int) -> Tensor:
    return _experts_outermost(torch.cat([_per_expert(a.detach(), e) for _, a, _ in sides], dim=1))


def _gate_up_b(sides: list[tuple[bool, Tensor, Tensor]], e: int, i: int, interleaved: bool) -> Tensor:
    rank = sum(b.shape[-1] for _, _, b in sides)
    out = sides[0][2].new_zeros(e, 2 * i, rank)
    column = 0
    for is_up, _, b in sides:
        rows = slice(int(is_up), None, 2) if interleaved else slice(is_up * i, (is_up + 1) * i)
        out[:, rows, column : column + b.shape[-1]] = b.detach()
        column += b.shape[-1]
    return _experts_innermost(out, e)


def _experts_outermost(a: Tensor) -> Tensor:
    """[E, R, in] -> [E * R, in]."""
    return a.detach().flatten(0, 1)


def _experts_innermost(b: Tensor, e: int) -> Tensor:
    """[E, out, R] or shared [out, R] -> [out, R * E]."""
    return _per_expert(b.detach(), e).permute(1, 2, 0).flatten(1)


def _per_expert(factor: Tensor, e: int) -> Tensor:
    return factor if factor.ndim == 3 else factor.expand(e, *factor.shape)


def _short_names(targets: Iterable[str], candidates: list[str], how: str) -> dict[str, str]:
    """Full name -> the name PEFT gets: a suffix where all that end in it are targets, else the full name."""
    targets = list(targets)
    shorts = {}
    for target in targets:
        short = target.rpartition(".")[2] if how == "leaf" else re.split(r"\.\d+\.", target)[-1]
        same = {name for name in candidates if name == short or name.endswith(f".{short}")}
        shorts[target] = short if same <= set(targets) else target
    return shorts


def _patterns(values: dict[str, Any], names: dict[str, str], default: Any) -> dict[str, Any]:
    """Name -> value, where it is not the default; full names where a short one would cover several values."""
    by_name: dict[str, set[Any]] = {}
    for target, value in values.items():
        by_name.setdefault(names[target], set()).add(value)
    patterns = {}
    for target, value in values.items():
        mixed = len(by_name[names[target]]) > 1
        if value != default:
            patterns[target if mixed else names[target]] = value
    return patterns
