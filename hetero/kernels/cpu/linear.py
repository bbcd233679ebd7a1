"""The linear kernels: y = x W^T with bias and LoRA, and its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.cpu.checks import as_bf16, expect
from hetero.kernels.cpu.context import Context, context
from hetero.kernels.cpu.packed import PackedWeight, padded
from hetero.kernels.cpu.runs import Runs, listed


class PackedLora(NamedTuple):
    """y += scale * (x A^T rounded to bf16) B^T, with a [r, K] and b [N, r] packed."""

    a: PackedWeight
    b: PackedWeight
    scale: float


class LinearGrads(NamedTuple):
    """Gradients of `linear`; None where not asked for."""

    dx: torch.Tensor | None
    da: torch.Tensor | None
    db: torch.Tensor | None


def _check_lora(weight: PackedWeight, lora: PackedLora) -> None:
    if lora.a.k != weight.k or lora.b.n != weight.n or lora.a.n != lora.b.k:
        raise ShapeError(
            f"LoRA factors are a [{lora.a.n}, {lora.a.k}] and b [{lora.b.n}, {lora.b.k}]; "
            f"expected a [r, {weight.k}] and b [{weight.n}, r]"
        )


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    lora: PackedLora | Runs[PackedLora] | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    ctx: Context | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, K] -> (y [T, N] in out_dtype (bf16 or fp32), xa).

    x is rounded to bf16; sums are fp32 in one fixed order, so a row's bits do not depend on other rows, nor
    on which run of `lora` it is in. The weight is read once for all runs.
    xa [T, r rounded up to 32] bf16 is what `linear_backward` needs of the LoRA branch, None without one.
    """
    expect("x", x, (None, weight.k))
    if bias is not None:
        expect("bias", bias, (weight.n,))
        bias = bias.float().contiguous()
    out = torch.empty(x.shape[0], weight.n, dtype=out_dtype)
    expect("out", out, (x.shape[0], weight.n), torch.bfloat16, torch.float32)
    parts, ends = listed(lora, x.shape[0])
    xa, rank, scale = None, 0, 1.0
    for part in parts:
        if part is not None:
            _check_lora(weight, part)
            if xa is None:
                rank, scale = part.a.n, part.scale
                xa = torch.empty(x.shape[0], padded(rank), dtype=torch.bfloat16)
            elif (part.a.n, part.scale) != (rank, scale):
                raise ShapeError(
                    f"adapters of one call have the ranks {rank} and {part.a.n} and the scales {scale} and "
                    f"{part.scale}; expected versions of one adapter"
                )
    a = [None if part is None else part.a.data for part in parts]
    b = [None if part is None else part.b.data for part in parts]
    handle = (ctx or context()).handle
    _C.linear(handle, as_bf16(x), weight.data, weight.format, bias, a, b, ends, xa, rank, scale, out)
    return out, xa


def linear_backward(
    dout: torch.Tensor,
    weight: PackedWeight,
    x: torch.Tensor,
    lora: PackedLora | None = None,
    xa: torch.Tensor | None = None,
    *,
    need_dx: bool = True,
    need_lora: bool = True,
    dx_dtype: torch.dtype = torch.bfloat16,
    ctx: Context | None = None,
) -> LinearGrads:
    """dout [T, N] (rounded to bf16), x [T, K] -> dx [T, K] in dx_dtype, da [r, K] and db [N, r] fp32."""
    expect("dout", dout, (None, weight.n))
    expect("x", x, (dout.shape[0], weight.k))
    dx = torch.empty(x.shape, dtype=dx_dtype) if need_dx else None
    a = b = da = db = None
    rank, scale = 0, 1.0
    if lora is not None:
        _check_lora(weight, lora)
        a, b, rank, scale = lora.a.data, lora.b.data, lora.a.n, lora.scale
        if need_lora:
            da, db = torch.zeros(rank, weight.k), torch.zeros(weight.n, rank)
    handle = (ctx or context()).handle
    x, dout = as_bf16(x), as_bf16(dout)
    _C.linear_backward(handle, dout, weight.data, weight.format, x, a, b, xa, rank, scale, dx, da, db)
    return LinearGrads(dx, da, db)
