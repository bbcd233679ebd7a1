"""The module that stands where a Transformers experts module stood, and how such a module is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hetero.errors import ModelError
from hetero.experts.build import ExpertLayout, StoreBuilder
from hetero.formats import Packing
from hetero.kernels import ops, reference
from hetero.models.config import METHOD
from hetero.models.routing_site import RoutingSite

if TYPE_CHECKING:
    from torch import Tensor

    from hetero.experts.store import ExpertStore

GATED_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


class HeteroExperts(nn.Module):
    """The routed experts of one layer, computed from an `ExpertStore`.

    While the checkpoint loads it carries parameters of the original names and shapes on the meta device, so
    that Transformers finds where tensors go; they vanish as their data is packed.

    Attributes:
        layout: how the checkpoint stores the tensors.
        store: the packed experts; None until loading has finished.
        lora: adapter factors of these experts, or None.
        routing: where the selection of experts can be watched and replayed.
    """

    def __init__(self, layout: ExpertLayout, shapes: dict[str, tuple[int, ...]], packing: Packing | None):
        super().__init__()
        self.layout = layout
        self.num_experts = layout.num_experts
        self.routing = RoutingSite(layout.num_experts)
        self.store: ExpertStore | None = None
        self.lora: ops.ExpertLoraFactors | ops.Runs[ops.ExpertLoraFactors] | None = None
        self._builder: StoreBuilder | None = StoreBuilder(layout, packing)
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            )

    @property
    def builder(self) -> StoreBuilder:
        """The builder that takes this layer's tensors. Raises ModelError once the store is complete."""
        if self._builder is None:
            raise ModelError("these experts are already packed; load the checkpoint into a fresh model")
        return self._builder

    def arrived(self, name: str) -> None:
        """Drop the placeholder of a packed tensor; the store is made when the last one is gone."""
        self._parameters.pop(name)
        if not self._parameters:
            self.store, self._builder = self.builder.finish(), None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index [T, K] int, top_k_weights [T, K] -> like hidden_states."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        at = self.layout
        return f"experts={at.num_experts}, hidden={at.hidden_size}, intermediate={at.intermediate_size}"


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts implementation that Transformers knows as "hetero"."""
    store = getattr(module, "store", None)
    if store is None:
        raise ModelError(
            f"{type(module).__name__} holds no packed experts: experts_implementation='{METHOD}' needs a "
            "model that was "
            "loaded with quantization_config=HeteroConfig(...) or hetero.load_model()"
        )
    if module.routing.watched:
        on_cpu = store.gate_up.data.device.type == "cpu"
        module.routing.saw(top_k_index, top_k_weights, on_cpu=on_cpu)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    out = ops.experts(store, flat, top_k_index, top_k_weights, lora=module.lora)
    return out.view(hidden_states.shape)


ALL_EXPERTS_FUNCTIONS.register(METHOD, experts_forward)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the fused experts of a Transformers model (3-D weights behind
    `use_experts_implementation`)."""
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj"):
            yield name, module


def read_layout(name: str, module: Any) -> ExpertLayout:
    """How `module` lays out and gates its experts. Raises ModelError, naming it, when hetero cannot express
    that."""
    where = f"{name} ({type(module).__name__})"
    if not module.has_gate:
        raise ModelError(f"{where} has experts without a gate projection; hetero computes gated experts only")
    if module.has_post_expert_norm:
        raise ModelError(f"{where} normalises the output of each expert; hetero cannot do that yet")
    down = module.down_proj
    num_experts, hidden, intermediate = down.shape
    if module.is_transposed:
        hidden, intermediate = intermediate, hidden
    kind, limit, alpha = _read_gate(where, module)
    return ExpertLayout(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        transposed=module.is_transposed,
        interleaved=not module.is_concatenated,
        has_bias=module.has_bias,
        activation=kind,
        limit=limit,
        alpha=alpha,
    )


def _read_gate(where: str, module: Any) -> tuple[str, float | None, float | None]:
    """Which of our gated activations `module._apply_gate` is, found by comparing values, not names."""
    limit = _number(module, "limit", "swiglu_limit")
    alpha = _number(module, "alpha", "swiglu_alpha")
    with torch.device("cpu"):
        grid = torch.linspace(-20.0, 20.0, 81, dtype=torch.float64)
        gate, up = grid.repeat_interleave(len(grid)), grid.repeat(len(grid))
        pair = torch.cat([gate, up]) if module.is_concatenated else torch.stack([gate, up], -1).flatten()
        got = module._apply_gate(pair[None])[0]
        for kind, lim, alp in _candidates(limit, alpha):
            want = reference.gated_activation(gate, up, kind, limit=lim, alpha=alp)
            if torch.allclose(got, want.to(got.dtype), rtol=1e-5, atol=1e-6):
                return kind, lim, alp
    raise ModelError(
        f"{where} gates its experts in a way hetero does not know (limit={limit}, alpha={alpha}); known are "
        f"act(gate) * up with act one of {', '.join(GATED_KINDS)}, the same with clamped inputs, and "
        "swiglu_oss"
    )


def _candidates(limit: float | None, alpha: float | None) -> Iterator[tuple[str, float | None, float | None]]:
    for kind in GATED_KINDS:
        yield kind, None, None
        if limit is not None:
            yield kind, limit, None
    if limit is not None and alpha is not None:
        yield "swiglu_oss", limit, alpha


def _number(module: Any, *names: str) -> float | None:
    for name in names:
        value = getattr(module, name, None)
        if value is not None and math.isfinite(float(value)):
            return float(value)
    return None


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where `model` holds the module called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def replace_experts(model: nn.Module, packing: Packing | None) -> list[str]:
    """Put `HeteroExperts` in the place of every fused experts module; returns their names. packing as of
    `StoreBuilder`."""
    names = []
    for name, module in list(experts_modules(model)):
        shapes = {p: tuple(t.shape) for p, t in module.named_parameters(recurse=False)}
        replace_module(model, name, HeteroExperts(read_layout(name, module), shapes, packing))
        names.append(name)
    return names


def expert_formats(model: nn.Module) -> str:
    """Names of the formats that the experts are packed in, such as "int4"; empty without experts."""
    stores = [m.store for m in model.modules() if isinstance(m, HeteroExperts) and m.store is not None]
    return ", ".join(dict.fromkeys(name for store in stores for name in store.format.split(", ")))
