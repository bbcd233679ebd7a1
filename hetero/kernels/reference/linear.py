"""The linear layer in plain PyTorch."""

from __future__ import annotations

import torch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N], lora (a [r, K], b [N, r], scale) -> [..., N] in x's dtype."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    if lora is not None:
        a, b, scale = lora
        y = y + scale * ((x @ a.T) @ b.T)
    return y
