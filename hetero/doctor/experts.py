"""Whether the experts really run, and compute what their weights say."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from hetero.doctor.finding import Finding, judge
from hetero.kernels import reference
from hetero.models.experts import HeteroExperts
from hetero.models.probe import probe_hidden

TOLERANCE = 0.02
"""Relative error of one layer against fp32: activations are rounded to bf16 three times on the way."""
_TOKENS = 3


def check_experts(model: PreTrainedModel) -> Iterator[Finding]:
    """Count the expert layers that a forward calls; compare the first one with plain PyTorch."""
    layers = [module for module in model.modules() if isinstance(module, HeteroExperts)]
    if not layers:
        yield Finding("experts/run", True, "none: a dense model")
        return
    called: set[HeteroExperts] = set()
    hooks = [layer.register_forward_hook(lambda module, args, out: called.add(module)) for layer in layers]
    try:
        probe_hidden(model)
    finally:
        for hook in hooks:
            hook.remove()
    yield judge(
        "experts/run",
        len(called) == len(layers),
        f"{len(called)} of {len(layers)} layers of {layers[0].num_experts} experts",
        "Some experts are never called: the model is patched, or its class is not supported. Load it with an "
        "unchanged Transformers.",
    )
    error = relative_error(layers[0])
    yield judge(
        "experts/error",
        error < TOLERANCE,
        error,
        f"The kernels do not compute what the weights say (limit {TOLERANCE}). Compare with "
        "HETERO_ISA=scalar, and report it with the output of `hetero doctor --json`.",
    )


@torch.no_grad()
def relative_error(layer: HeteroExperts) -> float:
    """|kernels - plain PyTorch in fp32| / |plain PyTorch| of one layer, on random tokens and two experts."""
    store = layer.store
    assert store is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, store.hidden_size, generator=generator).bfloat16()
    chosen = torch.randperm(store.num_experts, generator=generator)[:2]
    ids = chosen.repeat(_TOKENS, 1)
    weights = torch.rand(ids.shape, generator=generator)
    gate_up, down = (stack[chosen].float() for stack in store.dequantize())
    biases = (store.gate_up_bias, store.down_bias)
    gate_up_bias, down_bias = (None if bias is None else bias[chosen] for bias in biases)
    want = reference.experts(
        gate_up,
        down,
        x.float(),
        torch.arange(len(chosen)).repeat(_TOKENS, 1),
        weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=store.activation,
        limit=store.limit,
        alpha=store.alpha,
    )
    got = store.forward(x, ids, weights).float()
    return float((got - want).norm() / want.norm())
