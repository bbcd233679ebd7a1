"""LoRA adapters of a model: configuration, placement, the switch to the base model, and versions.

The base weights are frozen and never merged into. Master factors are fp32 parameters on the modules they
adapt; the kernels cast them to bf16 once per version, for sampling and training alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hetero.errors import ModelError
from hetero.kernels import ops
from hetero.models.adapter_state import Adaptable, Adapter, Factors, adapter_of, computing_with
from hetero.models.experts import HeteroExperts
from hetero.models.lora_config import GROUPS, LoraConfig
from hetero.models.lora_linear import LoraLinear
from hetero.models.lora_targets import find_sites, linear_shape
from hetero.models.seeding import named_generator

__all__ = [
    "LoraConfig",
    "adapter_version",
    "attach_lora",
    "bump_adapter_version",
    "detach_lora",
    "lora_disabled",
    "lora_factors",
    "lora_parameters",
]

_PARTS = ("a", "b", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


def attach_lora(model: nn.Module, config: LoraConfig, seed: int = 0) -> None:
    """Freeze the model and put new LoRA factors on the modules that `config` names.

    A is Kaiming-uniform (a = sqrt 5, i.e. uniform within 1 / sqrt(fan in)), drawn from `seed` and the
    module's name alone; B is zero, so the model's outputs do not change.

    Raises: ModelError when a target reaches no module or the model has an adapter already.
    """
    sites = find_sites(model, config.targets, lenient=tuple(config.targets) == GROUPS)
    for name, projections in sites.items():
        module = model.get_submodule(name)
        rank = config.rank
        if isinstance(module, HeteroExperts):
            rank = config.expert_rank or config.rank
            shapes = _expert_shapes(module, projections, rank, config.expert_layout == "shared_outer")
        else:
            outs, ins = linear_shape(module)
            shapes = {"a": (rank, ins), "b": (outs, rank)}
        factors = {part: _initial(name, part, shape, seed) for part, shape in shapes.items()}
        install_factors(model, name, factors, config.alpha / rank)


def install_factors(model: nn.Module, name: str, factors: dict[str, Tensor], scale: float) -> None:
    """Put factor tensors on one module: {"a", "b"} on a linear layer, {"gate_a", ...} on experts.

    Raises: ModelError when the module has factors already.
    """
    adapter = adapter_of(model)
    if name in adapter.modules:
        raise ModelError(
            f"{name} carries LoRA already; call detach_lora(model) before attaching another adapter"
        )
    if not adapter.modules:
        model.requires_grad_(False)
    module = _adaptable(model, name)
    device = module.weight.device if isinstance(module, LoraLinear) else torch.device("cpu")
    masters = {
        part: nn.Parameter(factors[part].to(device, torch.float32)) for part in _PARTS if part in factors
    }
    for part, master in masters.items():
        module.register_parameter(f"lora_{part}", master)
    if isinstance(module, HeteroExperts):
        module.lora = adapter.factors[name] = ops.ExpertLoraFactors(**masters, scale=scale)
    else:
        module.lora = adapter.factors[name] = ops.LoraFactors(masters["a"], masters["b"], scale)
    adapter.modules[name] = module
    adapter.masters += masters.values()


def _adaptable(model: nn.Module, name: str) -> Adaptable:
    """The module called `name`; an ordinary linear layer is exchanged for one that can carry LoRA."""
    module = model.get_submodule(name)
    if isinstance(module, Adaptable):
        return module
    if not isinstance(module, nn.Linear):
        raise ModelError(f"{name} is a {type(module).__name__}, which cannot carry LoRA")
    adaptable = LoraLinear(module)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, adaptable)
    return adaptable


def detach_lora(model: nn.Module) -> None:
    """Remove every factor. The model computes the base model again, and may take another adapter."""
    adapter = adapter_of(model)
    for module in adapter.modules.values():
        module.lora = None
        for part in [part for part in module._parameters if part.startswith("lora_")]:
            del module._parameters[part]
    model.__dict__["_hetero_adapter"] = Adapter(version=adapter.version + 1, window=adapter.window)


def lora_factors(model: nn.Module) -> dict[str, Factors]:
    """Name of a module -> the factors that it carries, in the order of the model."""
    return dict(adapter_of(model).factors)


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> fp32 master factor, in the order of the model. Update them in place, never through `.data`."""
    return {
        f"{name}.{part}": parameter
        for name, module in adapter_of(model).modules.items()
        for part, parameter in module.named_parameters(recurse=False)
        if part.startswith("lora_")
    }


def lora_active(model: nn.Module) -> bool:
    """Whether the model computes with its adapter: it has one, and not `lora_disabled`."""
    return any(module.lora is not None for module in adapter_of(model).modules.values())


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Within this context the model is the base model, bit for bit."""
    with computing_with(model, {}):
        yield


def adapter_version(model: nn.Module) -> int:
    """How often the adapter has changed since the model was loaded."""
    return adapter_of(model).version


def bump_adapter_version(model: nn.Module, to: int | None = None) -> int:
    """Say that the factors have changed; returns the new version: the next, or `to` when a run resumes."""
    adapter = adapter_of(model)
    adapter.version = adapter.version + 1 if to is None else to
    adapter.trim()
    return adapter.version


def _expert_shapes(
    module: HeteroExperts, projections: tuple[str, ...], rank: int, shared: bool
) -> dict[str, tuple[int, ...]]:
    e, h, i = module.layout.num_experts, module.layout.hidden_size, module.layout.intermediate_size
    outer = () if shared else (e,)
    shapes = {
        "gate_a": (*outer, rank, h),
        "gate_b": (e, i, rank),
        "up_a": (*outer, rank, h),
        "up_b": (e, i, rank),
        "down_a": (e, rank, i),
        "down_b": (*outer, h, rank),
    }
    return {part: shape for part, shape in shapes.items() if part.split("_")[0] in projections}


def _initial(name: str, part: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if part.endswith("b"):
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=named_generator(seed, f"{name}.{part}"))
