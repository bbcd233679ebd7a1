"""Causal attention over packed segments: differentiable in the training layout, paged in the engine's.

Both walk KV in blocks of 32 tokens with the same kernels, so a query row gets the same bits from decoding,
from chunked or whole prefill and from training batches, shared prompts or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hetero.kernels.batch import AttentionBatch, KVLayer
from hetero.kernels.cpu import attention as kernels
from hetero.kernels.cpu.context import context


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        options: kernels.AttentionOptions,
    ) -> torch.Tensor:
        ctx.batch, ctx.options, ctx.kernels = batch, options, context()
        out, lse = kernels.attention(ctx.kernels, kernels.Problem(q, k, v, batch, options), batch)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        problem = kernels.Problem(q, k, v, ctx.batch, ctx.options)
        dq, dk, dv = kernels.attention_backward(ctx.kernels, problem, ctx.batch, out, lse, dout)
        return dq, dk, dv, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every segment of the training layout.

    Args:
        q: [T, Hq, D]; k: [R, Hkv, D]; v: [R, Hkv, Dv]; bf16 on the CPU, any stride in the first two axes.
        batch: with kv_rows (rows of k and v; in a training batch R = T, one axis for all) and kv_start.
        scale: factor on q . k.
        window: a query at position p sees positions p - window + 1 to p.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [Hq], one extra logit per head that takes part in the softmax and carries no value (frozen: it
            gets no gradient).

    Returns:
        [T, Hq, Dv] bf16; rows that belong to no segment are 0.

    Raises:
        ShapeError: shapes, dtypes, devices or the batch's indices do not fit together.
    """
    options = kernels.AttentionOptions(scale, window, softcap, None if sinks is None else sinks.detach())
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, batch, options)
    return kernels.attention(context(), kernels.Problem(q, k, v, batch, options), batch)[0]


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: KVLayer,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the keys and values of the new tokens into their slots, then attend through the block tables.

    Args:
        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv] of the T new tokens; bf16 on the CPU.
        pool: the layer's blocks. The token at offset 0 of a block clears the block first, so a block that
            changes hands needs no other care.
        batch: with block_tables and slots.
        scale, window, softcap, sinks: as in `attention`.

    Returns:
        [T, Hq, Dv] bf16, no gradient.

    Raises:
        ShapeError: shapes, dtypes, devices, block ids or slots do not fit together.
    """
    options = kernels.AttentionOptions(scale, window, softcap, None if sinks is None else sinks.detach())
    with torch.no_grad():
        return kernels.paged_attention(context(), kernels.Problem(q, k, v, batch, options), pool, batch)
