"""A linear layer with a frozen packed weight, bias and LoRA; gradients for its input and the factors."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hetero.errors import ShapeError
from hetero.kernels.cpu.context import context
from hetero.kernels.cpu.linear import linear as cpu_linear
from hetero.kernels.cpu.linear import linear_backward
from hetero.kernels.cpu.packed import PackedWeight
from hetero.kernels.cpu.runs import Runs
from hetero.kernels.ops.lora import LoraFactors, packed_lora


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        lora: LoraFactors | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.kernels, ctx.weight = context(), weight
        # The copies of this version: backward is right even if the masters have changed by then.
        ctx.lora = packed_lora(lora)
        y, xa = cpu_linear(x, weight, bias, ctx.lora, out_dtype=out_dtype, ctx=ctx.kernels)
        ctx.save_for_backward(x, xa)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, xa = ctx.saved_tensors
        need_dx, need_a, need_b, *_ = ctx.needs_input_grad
        grads = linear_backward(
            dy,
            ctx.weight,
            x,
            ctx.lora,
            xa,
            need_dx=need_dx,
            need_lora=need_a or need_b,
            dx_dtype=x.dtype,
            ctx=ctx.kernels,
        )
        return grads.dx, grads.da, grads.db, None, None, None, None


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    lora: LoraFactors | Runs[LoraFactors] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = x W^T + bias + lora.scale * (x A^T) B^T on the CPU kernels.

    Args:
        x: [..., K] bf16 or fp32 on the CPU; it is rounded to bf16.
        weight: packed [N, K], frozen. bias: [N] or None, frozen.
        lora: factors that get gradients (fp32); or several versions of them, each for its run of the rows,
            without gradient; or None.
        out_dtype: bfloat16 or float32; default the dtype of x. Sums are fp32, rounded once.

    Returns:
        [..., N]. Each row's bits depend on that row alone.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ShapeError(f"x is {x.dtype}; expected bfloat16 or float32")
    if weight.e != 1 or weight.stacked:
        raise ShapeError(f"weight is a stack of {weight.e} matrices; linear takes a single one")
    dtype = out_dtype or x.dtype
    rows = x.reshape(-1, x.shape[-1])
    factors = (lora.a, lora.b) if isinstance(lora, LoraFactors) else (None, None)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, *factors)):
        if isinstance(lora, Runs):
            raise ShapeError("there is no gradient through several adapter versions in one call")
        y = _Linear.apply(rows, *factors, weight, bias, lora, dtype)
    else:
        y, _ = cpu_linear(rows, weight, bias, packed_lora(lora), out_dtype=dtype)
    return y.reshape(*x.shape[:-1], weight.n)
