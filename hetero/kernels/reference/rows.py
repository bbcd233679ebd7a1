"""Row operations in plain PyTorch: norms, activations, softmax, top-k.

Floating-point inputs of 16 bits are computed in fp32; fp32 and fp64 inputs in their own precision.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hetero.errors import ShapeError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oss")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    round_first: bool | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, in the dtype of x.

    Args:
        round_first: round the normalised row to the dtype of x before the weight is applied (Llama's norm) or
            not (Gemma's, gpt-oss's). Default: only when offset is 0.
    """
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first is None:
        round_first = offset == 0.0
    if round_first:
        y = y.to(x.dtype)
    return (y.to(wide.dtype) * (offset + weight.to(wide.dtype))).to(x.dtype)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """One of `ACTIVATIONS`, elementwise, in the dtype of x."""
    wide = _wide(x)
    if kind == "silu":
        y = functional.silu(wide)
    elif kind == "gelu":
        y = functional.gelu(wide)
    elif kind == "gelu_tanh":
        y = functional.gelu(wide, approximate="tanh")
    elif kind == "relu":
        y = functional.relu(wide)
    elif kind == "sigmoid":
        y = torch.sigmoid(wide)
    else:
        raise ShapeError(f"unknown activation {kind!r}: expected one of {', '.join(ACTIVATIONS)}")
    return y.to(x.dtype)


def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    limit: float | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    """act(gate) * up, computed wide and rounded once to the dtype of gate.

    With `limit`, gate is clamped from above and up from both sides first. "swiglu_oss" (gpt-oss) is
    gate * sigmoid(alpha * gate) * (up + 1), alpha 1.702 by default.
    """
    g, u = _wide(gate), _wide(up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if kind == "swiglu_oss":
        y = g * torch.sigmoid((1.702 if alpha is None else alpha) * g) * (u + 1.0)
    else:
        y = activation(g, kind) * u
    return y.to(gate.dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis; fp32 out (fp64 for fp64 in)."""
    return torch.softmax(_wide(x), dim=-1)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last axis, largest first, ties to the lower index: (values, int64 ids)."""
    ids = torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]
    return x.gather(-1, ids), ids
