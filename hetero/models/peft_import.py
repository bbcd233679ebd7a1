"""PEFT's LoRA tensors in our terms: the inverse of `peft_export`, for adapters of any origin."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from hetero.errors import ModelError
from hetero.models.experts import HeteroExperts
from hetero.models.lora_targets import expert_modules, linear_modules, linear_shape

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_ONE_EXPERT = re.compile(r"(?P<layer>.+\.\d+)\..*experts\.(?P<expert>\d+)\.(?P<projection>\w+)")
_PROJECTION = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_UNSUPPORTED = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
)


@dataclass
class Plan:
    """Factors for one module: {"a", "b"} or {"gate_a", ...} in fp32, and their scale."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0


def read_peft(model: nn.Module, directory: Path) -> dict[str, Plan]:
    """Module name -> factors of the PEFT adapter in `directory`, for this model.

    Raises: ModelError when the adapter uses something other than plain LoRA, or does not fit the model.
    """
    config = _read_config(directory)
    linears, experts = linear_modules(model), expert_modules(model)
    plans: dict[str, Plan] = {}
    single: dict[str, dict[str, dict[int, tuple[Tensor, Tensor, float]]]] = {}
    for key, a, b in _pairs(directory):
        name = re.sub(r"(\.base_layer)+$", "", key)
        match = _ONE_EXPERT.fullmatch(key)
        if name in linears:
            shape = linear_shape(linears[name])
            _require(key, a.shape[1] == shape[1] and b.shape[0] == shape[0], a, b, shape)
            scale = _scale(config, (name, f"{name}.weight"), a.shape[0])
            plans[name] = Plan({"a": a, "b": b}, scale)
        elif name in experts:
            _add_fused(plans.setdefault(name, Plan()), name, key, experts[name], a, b, config)
        elif match and (owner := _owner(match["layer"], experts)) and match["projection"] in _PROJECTION:
            projection = _PROJECTION[match["projection"]]
            scale = _scale(config, (key,), a.shape[0])
            single.setdefault(owner, {}).setdefault(projection, {})[int(match["expert"])] = (a, b, scale)
        else:
            raise ModelError(
                f"the adapter in {directory} adapts {key}, which {type(model).__name__} has not; it was made "
                "for another model"
            )
    for name, projections in single.items():
        _add_single(plans.setdefault(name, Plan()), name, experts[name].layout.num_experts, projections)
    for name in plans.keys() & experts.keys():
        _level_ranks(plans[name])
        _share(plans[name])
    return plans


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "adapter_config.json"
    if not path.is_file() or not (directory / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{directory} holds no PEFT adapter: expected adapter_config.json and adapter_model.safetensors"
        )
    config: dict[str, Any] = json.loads(path.read_text())
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {config.get('peft_type')!r}, only 'LORA' can be loaded")
    odd = [name for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise ModelError(f"{path}: {', '.join(odd)} is set, but only plain LoRA can be loaded")
    return config


def _pairs(directory: Path) -> list[tuple[str, Tensor, Tensor]]:
    """(module key, A, B) in fp32, for every pair of the file."""
    sides: dict[str, dict[str, Tensor]] = {}
    path = directory / "adapter_model.safetensors"
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (not a dict)
            match = _KEY.fullmatch(key)
            if match is None:
                raise ModelError(f"{path} holds {key}, which is not a LoRA factor")
            sides.setdefault(match["module"], {})[match["side"]] = file.get_tensor(key).float()
    torn = [key for key, pair in sides.items() if len(pair) != 2]
    if torn:
        raise ModelError(f"{path} holds only one factor of {', '.join(torn[:4])}")
    return [(key, pair["A"], pair["B"]) for key, pair in sides.items()]


def _scale(config: dict[str, Any], names: tuple[str, ...], rank: int) -> float:
    """alpha / rank, where the patterns of the config name another alpha for some modules."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _add_fused(
    plan: Plan, name: str, key: str, module: HeteroExperts, a: Tensor, b: Tensor, config: dict[str, Any]
) -> None:
    at = module.layout
    e, h, i = at.num_experts, at.hidden_size, at.intermediate_size
    shape = a.shape[1], b.shape[0]
    fits = a.shape[0] == b.shape[1] and a.shape[0] % e == 0
    _require(key, fits and {shape, shape[::-1]} & {(h, 2 * i), (i, h)} != set(), a, b, (2 * i, h), (h, i))
    rank = a.shape[0] // e
    a = a.view(e, rank, -1)
    b = b.view(-1, rank, e).permute(2, 0, 1)
    if shape not in {(h, 2 * i), (i, h)} or _is_reversed(key, shape, config):
        a, b = b.mT, a.mT
    is_gate_up = a.shape[2] == h and b.shape[1] == 2 * i
    scale = _scale(config, (f"{name}.{'gate_up_proj' if is_gate_up else 'down_proj'}",), rank)
    if not is_gate_up:
        _add(plan, {"down_a": a.contiguous(), "down_b": b.contiguous()}, scale)
        return
    gate, up = (b[:, 0::2], b[:, 1::2]) if at.interleaved else (b[:, :i], b[:, i:])
    half = rank // 2
    if rank % 2 == 0 and not gate[..., half:].any() and not up[..., :half].any():
        sides = (a[:, :half], gate[..., :half]), (a[:, half:], up[..., half:])
    else:
        sides = (a, gate), (a, up)
    factors = {
        f"{p}_{side}": t
        for p, pair in zip(("gate", "up"), sides, strict=True)
        for side, t in zip("ab", pair, strict=True)
    }
    _add(plan, {part: tensor.contiguous() for part, tensor in factors.items()}, scale)


def _is_reversed(key: str, shape: tuple[int, int], config: dict[str, Any]) -> bool:
    """Whether A and B of a square parameter changed places, as PEFT stored them before 0.20."""
    if shape[0] != shape[1]:
        return False
    version = re.match(r"(\d+)\.(\d+)", config.get("peft_version") or "")
    if version is None:
        raise ModelError(
            f"the factors of {key} are square and adapter_config.json names no peft_version, so A and B "
            "cannot be told apart (PEFT 0.20 exchanged them); add the peft_version that saved the adapter"
        )
    return (int(version[1]), int(version[2])) < (0, 20)


def _add_single(
    plan: Plan, name: str, e: int, projections: dict[str, dict[int, tuple[Tensor, Tensor, float]]]
) -> None:
    for projection, found in projections.items():
        missing = [index for index in range(e) if index not in found]
        if missing:
            raise ModelError(f"the adapter lacks the {projection} factors of experts {missing[:8]} of {name}")
        pairs = [found[index] for index in range(e)]
        if len({(a.shape, b.shape, scale) for a, b, scale in pairs}) != 1:
            raise ModelError(
                f"the adapter's experts of {name} differ in rank or scale, which is not supported"
            )
        factors = {
            f"{projection}_a": torch.stack([a for a, _, _ in pairs]),
            f"{projection}_b": torch.stack([b for _, b, _ in pairs]),
        }
        _add(plan, factors, pairs[0][2])


def _add(plan: Plan, factors: dict[str, Tensor], scale: float) -> None:
    """Add factors to a plan; its one scale is that of the first, others carry the ratio in B."""
    if not plan.factors:
        plan.scale = scale
    ratio = scale / plan.scale
    plan.factors.update({p: t * ratio if p.endswith("_b") and ratio != 1 else t for p, t in factors.items()})


def _level_ranks(plan: Plan) -> None:
    """Give gate and up one rank, as the kernels want: zeros on both sides of a pair change nothing, ever."""
    factors = plan.factors
    if not {"gate_a", "up_a"} <= factors.keys():
        return
    ranks = {p: factors[f"{p}_a"].shape[1] for p in ("gate", "up")}
    for p, rank in ranks.items():
        more = max(ranks.values()) - rank
        factors[f"{p}_a"] = pad(factors[f"{p}_a"], (0, 0, 0, more))
        factors[f"{p}_b"] = pad(factors[f"{p}_b"], (0, more))


def _share(plan: Plan) -> None:
    """Store hidden-side factors once where all experts have the same: the shared-outer layout."""
    outer = [part for part in ("gate_a", "up_a", "down_b") if part in plan.factors]
    if all(
        torch.equal(plan.factors[part], plan.factors[part][:1].expand_as(plan.factors[part]))
        for part in outer
    ):
        plan.factors.update({part: plan.factors[part][0].clone() for part in outer})


def _owner(layer: str, experts: dict[str, HeteroExperts]) -> str | None:
    """The experts module of a layer, whatever older checkpoints called the block around it."""
    owners = [name for name in experts if name.startswith(f"{layer}.")]
    return owners[0] if len(owners) == 1 else None


def _require(key: str, fits: bool, a: Tensor, b: Tensor, *weights: tuple[int, ...]) -> None:
    if not fits:
        raise ModelError(
            f"the adapter's factors for {key} are A {tuple(a.shape)} and B {tuple(b.shape)}, which do not "
            f"fit a weight of {' or '.join(map(str, weights))}"
        )
