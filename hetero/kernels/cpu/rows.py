"""Row operations of the extension on checked tensors; no autograd here (see `hetero.kernels.ops`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.cpu.checks import checked, is_bf16, like
from hetero.kernels.cpu.context import Context

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4, "swiglu_oss": 5}
"""Numbers of the activations in the extension (`Activation` in csrc/kernels/row_types.h)."""


def _kind(kind: str, gated: bool) -> int:
    number = KINDS.get(kind)
    if number is None or (kind == "swiglu_oss" and not gated):
        known = [name for name in KINDS if gated or name != "swiglu_oss"]
        raise ShapeError(f"unknown activation {kind!r}: expected one of {', '.join(known)}")
    return number


@lru_cache(maxsize=256)
def gate_of(kind: str, limit: float | None, alpha: float | None) -> Any:
    """The extension's description of a gated activation."""
    if limit is not None and limit <= 0.0:
        raise ShapeError(f"limit is {limit}; expected a positive bound, or None for no clamp")
    return _C.Gate(
        _kind(kind, gated=True), limit is not None, limit or 0.0, 1.702 if alpha is None else alpha
    )


@lru_cache(maxsize=256)
def _norm(n: int, eps: float, offset: float, round_first: bool, x_bf16: bool, weight_bf16: bool) -> Any:
    return _C.Norm(n, eps, offset, round_first, x_bf16, weight_bf16)


class RmsNorm:
    """One RMS norm: the checked weight [H] and the extension's description of the computation."""

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool
    ) -> None:
        x_bf16, weight_bf16 = is_bf16("x", x), is_bf16("weight", weight)
        if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
            raise ShapeError(
                f"x has shape {list(x.shape)} and weight {list(weight.shape)}; expected [..., H] and [H]"
            )
        self.weight = weight.contiguous()
        self.handle = _norm(weight.shape[0], eps, offset, round_first, x_bf16, weight_bf16)

    def forward(self, c: Context, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        rows = x.numel() // max(1, self.weight.shape[0])
        _C.rms_norm(c.handle, self.handle, x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), rows)
        return y

    def backward(self, c: Context, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        x, dy = x.contiguous(), like("the gradient", dy, x)
        dx = torch.empty_like(x)
        rows = x.numel() // max(1, self.weight.shape[0])
        weight = self.weight.data_ptr()
        _C.rms_norm_backward(c.handle, self.handle, x.data_ptr(), weight, dy.data_ptr(), dx.data_ptr(), rows)
        return dx


def activation(c: Context, x: torch.Tensor, kind: str) -> torch.Tensor:
    bf16, x = is_bf16("x", x), x.contiguous()
    y = torch.empty_like(x)
    _C.activate(c.handle, _kind(kind, gated=False), x.data_ptr(), y.data_ptr(), x.numel(), bf16)
    return y


def activation_backward(c: Context, x: torch.Tensor, dy: torch.Tensor, kind: str) -> torch.Tensor:
    bf16, x = is_bf16("x", x), x.contiguous()
    dy, dx = like("the gradient", dy, x), torch.empty_like(x)
    number = _kind(kind, gated=False)
    _C.activate_backward(c.handle, number, x.data_ptr(), dy.data_ptr(), dx.data_ptr(), x.numel(), bf16)
    return dx


def gated(c: Context, gate: torch.Tensor, up: torch.Tensor, kind: Any) -> torch.Tensor:
    bf16, gate = is_bf16("gate", gate), gate.contiguous()
    up, y = like("up", up, gate), torch.empty_like(gate)
    _C.gate(c.handle, kind, gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel(), bf16)
    return y


def gated_backward(
    c: Context, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, kind: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    bf16, gate = is_bf16("gate", gate), gate.contiguous()
    up, dy = like("up", up, gate), like("the gradient", dy, gate)
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    g, u, d = gate.data_ptr(), up.data_ptr(), dy.data_ptr()
    _C.gate_backward(c.handle, kind, g, u, d, dgate.data_ptr(), dup.data_ptr(), gate.numel(), bf16)
    return dgate, dup


def softmax(c: Context, x: torch.Tensor) -> torch.Tensor:
    bf16, x = is_bf16("x", x), x.contiguous()
    y = torch.empty(x.shape, dtype=torch.float32)
    n = x.shape[-1]
    _C.softmax(c.handle, x.data_ptr(), y.data_ptr(), x.numel() // max(1, n), n, bf16)
    return y


def softmax_backward(c: Context, y: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dy, dx = like("the gradient", dy, y), torch.empty(y.shape, dtype=dtype)
    n = y.shape[-1]
    num_rows, bf16 = y.numel() // max(1, n), dtype is torch.bfloat16
    _C.softmax_backward(c.handle, y.data_ptr(), dy.data_ptr(), dx.data_ptr(), num_rows, n, bf16)
    return dx


def topk_ids(c: Context, x: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [..., k] int64 of the k largest of the last axis, largest first, ties to the lower id, NaN last."""
    n = x.shape[-1]
    if not 1 <= k <= n:
        raise ShapeError(f"topk of {n} values with k = {k}; expected 1 <= k <= {n}")
    x = checked("x", x.float(), tuple(x.shape), torch.float32)
    ids = torch.empty((*x.shape[:-1], k), dtype=torch.int64)
    _C.topk(c.handle, x.data_ptr(), ids.data_ptr(), x.numel() // n, n, k)
    return ids
