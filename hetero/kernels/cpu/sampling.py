"""Rows of logits: log-probabilities and sampling of the extension; no autograd (see `hetero.kernels.ops`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.cpu.checks import checked
from hetero.kernels.cpu.context import Context


class TokenStats(NamedTuple):
    """Per row [T] fp32: log-probability of the target, entropy, and two numbers that the gradient needs."""

    logp: torch.Tensor
    entropy: torch.Tensor
    max: torch.Tensor
    inverse_total: torch.Tensor


def cap_logits(c: Context, logits: torch.Tensor, factor: float, softcap: float | None) -> torch.Tensor:
    """logits [T, V] fp32 in place: x = softcap * tanh(factor * x / softcap), or factor * x."""
    if factor != 1.0 or softcap is not None:
        _C.cap_logits(c.handle, logits.data_ptr(), logits.shape[0], logits.shape[1], factor, softcap or 0.0)
    return logits


def token_logprobs(
    c: Context, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> TokenStats:
    """logits [T, V] fp32, targets [T] int64 in range, temperature [T] fp32: all contiguous."""
    rows, n = logits.shape
    stats = TokenStats(*(torch.empty(rows) for _ in range(4)))
    where = [x.data_ptr() for x in (logits, targets, temperature)]
    out = [x.data_ptr() for x in stats]
    _C.token_logprobs(c.handle, where[0], where[1], where[2], rows, n, out[0], out[1], out[2], out[3])
    return stats


def token_logprobs_backward(
    c: Context,
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    stats: TokenStats,
    gradient: torch.Tensor,
    factor: float,
    softcap: float | None,
) -> torch.Tensor:
    """Gradient [T, V] bf16 of the linear layer's output, given that of logp, `gradient` [T] fp32."""
    rows, n = logits.shape
    dlogits = torch.empty(rows, n, dtype=torch.bfloat16)
    _C.token_logprobs_backward(
        c.handle,
        logits.data_ptr(),
        targets.data_ptr(),
        temperature.data_ptr(),
        rows,
        n,
        stats.max.data_ptr(),
        stats.inverse_total.data_ptr(),
        gradient.data_ptr(),
        factor,
        softcap or 0.0,
        dlogits.data_ptr(),
    )
    return dlogits


def sample(
    c: Context,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [B] int64, logp [B] fp32, raw logp [B] fp32); see `hetero.kernels.ops.sample`."""
    if logits.ndim != 2 or logits.shape[1] < 1:
        raise ShapeError(f"logits has shape {list(logits.shape)}; expected [B, V]")
    rows, n = logits.shape
    logits = checked("logits", logits, (rows, n), torch.float32)
    if keys.dtype is torch.int64:
        keys = keys.view(torch.uint64)
    keys = checked("keys", keys, (rows, 4), torch.uint64)
    options = [
        checked("temperature", temperature.float(), (rows,), torch.float32),
        checked("top_p", top_p.float(), (rows,), torch.float32),
        checked("top_k", top_k.int(), (rows,), torch.int32),
        checked("min_p", min_p.float(), (rows,), torch.float32),
    ]
    for name, x, low, high in (
        ("temperature", options[0], 0.0, float("inf")),
        ("top_p", options[1], 0.0, 1.0),
        ("min_p", options[3], 0.0, 1.0),
    ):
        if not bool(((x >= low) & (x <= high)).all()):
            raise ShapeError(f"{name} is {x.tolist()}; expected values from {low} to {high}")
    ids, logp, raw = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
    at = [x.data_ptr() for x in (*options, keys, ids, logp, raw)]
    _C.sample(c.handle, logits.data_ptr(), rows, n, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7])
    return ids, logp, raw
