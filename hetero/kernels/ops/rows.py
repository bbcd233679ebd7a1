"""Row operations with gradients: norms, activations, softmax, top-k.

Tensors live on the CPU and are bf16 or fp32. Every row (every element of an activation) is computed alone, so
its bits do not depend on the batch around it, on its place in the batch or on the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hetero.errors import ShapeError
from hetero.kernels.cpu import rows
from hetero.kernels.cpu.context import context


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: rows.RmsNorm) -> torch.Tensor:
        ctx.norm, ctx.kernels = norm, context()
        ctx.save_for_backward(x)
        return norm.forward(ctx.kernels, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.norm.backward(ctx.kernels, x, dy), None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind, ctx.kernels = kind, context()
        ctx.save_for_backward(x)
        return rows.activation(ctx.kernels, x, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return rows.activation_backward(ctx.kernels, x, dy, ctx.kind), None


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: Any) -> torch.Tensor:
        ctx.kind, ctx.kernels = kind, context()
        ctx.save_for_backward(gate, up)
        return rows.gated(ctx.kernels, gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = rows.gated_backward(ctx.kernels, gate, up, dy, ctx.kind)
        return dgate, dup.to(up.dtype), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype, ctx.kernels = x.dtype, context()
        y = rows.softmax(ctx.kernels, x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return rows.softmax_backward(ctx.kernels, y, dy, ctx.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    round_first: bool | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, computed in fp32.

    Args:
        x: [..., H] bf16 or fp32; weight: [H] bf16 or fp32, frozen (it gets no gradient).
        eps: added to the mean square.
        offset: 1.0 for norms that store weight - 1 (Gemma).
        round_first: round the normalised row to the dtype of x before the weight is applied (Llama's norm) or
            not (Gemma's, gpt-oss's). Default: only when offset is 0.

    Returns:
        [..., H] in the dtype of x.

    Raises:
        ShapeError: shapes or dtypes differ from the above, or a tensor is not on the CPU.
    """
    norm = rows.RmsNorm(x, weight, eps, offset, offset == 0.0 if round_first is None else round_first)
    if x.requires_grad and torch.is_grad_enabled():
        return _RmsNorm.apply(x, norm)
    return norm.forward(context(), x)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """silu, gelu, gelu_tanh, relu or sigmoid of every element of x (bf16 or fp32), in the dtype of x.

    Finite, forward and backward, for every finite x.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _Activation.apply(x, kind)
    return rows.activation(context(), x, kind)


def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    limit: float | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    """act(gate) * up in one pass, computed in fp32 and rounded once to the dtype of gate.

    Args:
        gate, up: equal shapes, bf16 or fp32.
        kind: an activation, or "swiglu_oss" (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1).
        limit: clamp gate to at most limit and up to [-limit, limit] first.
        alpha: of swiglu_oss, 1.702 by default.
    """
    if gate.shape != up.shape:
        raise ShapeError(f"gate has shape {list(gate.shape)} and up {list(up.shape)}; expected equal shapes")
    handle = rows.gate_of(kind, limit, alpha)
    if (gate.requires_grad or up.requires_grad) and torch.is_grad_enabled():
        return _GatedActivation.apply(gate, up, handle)
    return rows.gated(context(), gate, up, handle)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis of x [..., E] (bf16 or fp32), in fp32."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Softmax.apply(x)
    return rows.softmax(context(), x)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last axis of x [..., E], largest first, ties to the lower id, NaN last.

    Returns:
        (values [..., k] in the dtype of x, differentiable; ids [..., k] int64).
    """
    ids = rows.topk_ids(context(), x.detach(), k)
    return x.gather(-1, ids), ids
