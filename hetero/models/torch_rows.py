"""Log-probabilities in PyTorch, in chunks: for an LM head that is not packed (dense parts on a GPU)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 256
"""Rows whose logits exist at a time."""


def token_logprobs(
    hidden: Tensor, logits: Callable[[Tensor], Tensor], targets: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` [T] under softmax(logits(hidden) / temperature), and the entropy of
    each row.

    hidden [T, H]; temperature a number or [T]. Never holds more than `CHUNK` rows of logits: the backward
    computes them again.

    Returns: (fp32 [T], differentiable; fp32 [T] without gradient).
    """

    def rows(h: Tensor, t: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits(h).float() / heat[:, None], dim=-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, t[:, None])[:, 0], entropy

    if not hidden.shape[0]:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty.clone()
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(hidden.shape[0])
    parts = []
    for chunk in zip(hidden.split(CHUNK), targets.split(CHUNK), heat.split(CHUNK), strict=True):
        parts.append(
            checkpoint(rows, *chunk, use_reentrant=False) if torch.is_grad_enabled() else rows(*chunk)
        )
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).detach()
