"""The experts of a layer as a differentiable operation, for tensors on the CPU or on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from hetero.errors import ShapeError
from hetero.kernels.cpu.context import context
from hetero.kernels.cpu.experts import LoraGrads, PackedExperts, experts_backward, experts_forward
from hetero.kernels.cpu.runs import Runs
from hetero.kernels.ops.expert_lora import ExpertLoraFactors, packed_expert_lora
from hetero.kernels.ops.staging import from_host, to_host


class Store(Protocol):
    """What `experts` needs of an expert store."""

    @property
    def packed(self) -> PackedExperts: ...


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        store: PackedExperts,
        lora: ExpertLoraFactors | None,
        keep: bool,
        *factors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.kernels, ctx.store, ctx.keep = context(), store, keep
        # The copies of this version: backward is right even if the masters have changed by then.
        ctx.lora = None if lora is None else lora.packed(store)
        ctx.factors = [None if f is None else (f.shape, f.device) for f in factors]
        ctx.weights_dtype = weights.dtype
        host_x, host_ids, host_weights = to_host(x, ids, weights)
        out, ctx.saved = experts_forward(
            store, host_x, host_ids, host_weights, ctx.lora, save=True, keep=keep, ctx=ctx.kernels
        )
        ctx.save_for_backward(x, host_x if x.is_cuda else None)
        return from_host(out, x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, staged = ctx.saved_tensors
        host_x = x if staged is None else staged
        need_dx, need_dweights, _, _, _, _, *need_factors = ctx.needs_input_grad
        (host_dout,) = to_host(dout)
        dx = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) if need_dx else None
        dweights = torch.empty(ctx.saved.num_tokens, ctx.saved.top_k) if need_dweights else None
        grads = [
            torch.zeros(known[0]) if need and known is not None else None
            for need, known in zip(need_factors, ctx.factors, strict=True)
        ]
        experts_backward(
            ctx.saved,
            ctx.store,
            host_x,
            host_dout,
            ctx.lora,
            dx=dx,
            dweights=dweights,
            grads=LoraGrads(*grads),
            ctx=ctx.kernels,
        )
        if dweights is not None:
            dweights = dweights.to(x.device, ctx.weights_dtype)
        placed = [
            None if grad is None else grad.to(known[1])
            for grad, known in zip(grads, ctx.factors, strict=True)
        ]
        return None if dx is None else from_host(dx, x.device), dweights, None, None, None, None, *placed


def experts(
    store: Store,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    lora: ExpertLoraFactors | Runs[ExpertLoraFactors] | None = None,
    *,
    keep: bool = True,
) -> torch.Tensor:
    """out[t] = sum over j of expert_weights[t, j] * expert(expert_ids[t, j])(x[t]).

    Args:
        store: the packed experts (an `ExpertStore`), frozen.
        x: [T, H] bf16 or fp32, on the CPU or on a CUDA device; rounded to bf16.
        expert_ids: [T, top_k] int64 or int32; -1 skips, an id may repeat within a token.
        expert_weights: [T, top_k] fp32, bf16 or fp16; gets a gradient.
        lora: factors that get gradients (fp32); or several versions of them, each for its run of the tokens,
            without gradient; or None.
        keep: keep the pre-activations for backward (4 bytes x I per pair); False computes them again.

    Returns:
        [T, H] in the dtype and on the device of x. Sums run in fp32 in ascending expert order and are rounded
        once; a row's bits depend on that row alone. The experts themselves always run on the CPU.

    Raises:
        ShapeError: shapes or dtypes do not fit, or an id is neither -1 nor an expert.
    """
    if x.dim() != 2:
        raise ShapeError(f"x is {list(x.shape)}; expected [T, H]")
    factors = lora.tensors() if isinstance(lora, ExpertLoraFactors) else (None,) * 6
    inputs = (x, expert_weights, *factors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        if isinstance(lora, Runs):
            raise ShapeError("there is no gradient through several adapter versions in one call")
        return _Experts.apply(x, expert_weights, expert_ids, store.packed, lora, keep, *factors)
    packed = packed_expert_lora(lora, store.packed)
    host_x, host_ids, host_weights = to_host(x, expert_ids, expert_weights)
    out, _ = experts_forward(store.packed, host_x, host_ids, host_weights, packed)
    return from_host(out, x.device)
