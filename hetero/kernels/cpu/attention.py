"""Attention of the extension on checked tensors; no autograd here (see `hetero.kernels.ops`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.batch import KV_BLOCK, AttentionBatch, KVLayer
from hetero.kernels.cpu.checks import checked
from hetero.kernels.cpu.context import Context


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What an attention layer does with its scores (see `hetero.kernels.ops.attention`)."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ShapeError(f"window is {self.window}; expected at least 1 position, or None for no window")
        if self.softcap is not None and self.softcap <= 0.0:
            raise ShapeError(f"softcap is {self.softcap}; expected a positive bound, or None for no cap")


class Problem:
    """One checked call: q, k, v [T, heads, dim] bf16 with unit stride in the last axis, and what they are."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 3 or x.dtype is not torch.bfloat16 or not x.is_cpu:
                raise ShapeError(
                    f"{name} is {x.dtype} {list(x.shape)} on {x.device}; "
                    "expected bfloat16 [T, heads, dim] on the CPU"
                )
        tokens, heads, dim = q.shape
        kv_tokens, kv_heads, v_dim = v.shape
        if k.shape != (kv_tokens, kv_heads, dim) or heads % max(1, kv_heads):
            raise ShapeError(
                f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}; expected [T, Hq, D], "
                "[R, Hkv, D] and [R, Hkv, Dv] with Hq a multiple of Hkv"
            )
        self.q, self.k, self.v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        self.out_shape = (tokens, heads, v_dim)
        self.shape = _C.AttentionShape(tokens, kv_tokens, heads, kv_heads, dim, v_dim)
        count = batch.num_segments
        self.q_start = checked("q_start", batch.q_start, (count + 1,), torch.int32)
        self.kv_len = checked("kv_len", batch.kv_len, (count,), torch.int32)
        self.segments = _C.Segments(count, self.q_start.data_ptr(), self.kv_len.data_ptr())
        sinks = options.sinks
        self.sinks = None if sinks is None else checked("sinks", sinks.float(), (heads,), torch.float32)
        self.params = _C.AttentionParams(
            options.scale,
            options.window or 0,
            options.softcap or 0.0,
            0 if self.sinks is None else self.sinks.data_ptr(),
        )


def _rows(x: torch.Tensor) -> Any:
    return _C.HeadRows(x.data_ptr(), x.stride(0), x.stride(1))


def _training(batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    if batch.kv_rows is None or batch.kv_start is None:
        raise ShapeError("attention needs the training layout: AttentionBatch.kv_rows and kv_start are None")
    start = checked("kv_start", batch.kv_start, (batch.num_segments + 1,), torch.int32)
    return checked("kv_rows", batch.kv_rows, (None,), torch.int32), start


def attention(c: Context, problem: Problem, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, Dv] bf16, log of the softmax's denominator [T, Hq] fp32); rows of no segment are 0."""
    kv_rows, kv_start = _training(batch)
    p, out = problem, torch.zeros(problem.out_shape, dtype=torch.bfloat16)
    lse = torch.zeros(problem.out_shape[:2])
    index = (kv_rows.data_ptr(), kv_start.data_ptr(), kv_rows.numel())
    q, k, v = _rows(p.q), _rows(p.k), _rows(p.v)
    try:
        _C.attention(c.handle, p.shape, q, k, v, p.segments, *index, p.params, out.data_ptr(), lse.data_ptr())
    except ValueError as error:
        raise ShapeError(str(error)) from None
    return out, lse


def attention_backward(
    c: Context,
    problem: Problem,
    batch: AttentionBatch,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    kv_rows, kv_start = _training(batch)
    p = problem
    dq = torch.zeros(p.q.shape, dtype=torch.bfloat16)
    dk, dv = torch.empty(p.k.shape, dtype=torch.bfloat16), torch.empty(p.v.shape, dtype=torch.bfloat16)
    dout = dout.to(torch.bfloat16).contiguous()
    _C.attention_backward(
        c.handle,
        p.shape,
        _rows(p.q),
        _rows(p.k),
        _rows(p.v),
        out.data_ptr(),
        lse.data_ptr(),
        _rows(dout),
        p.segments,
        kv_rows.data_ptr(),
        kv_start.data_ptr(),
        p.params,
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
    )
    return dq, dk, dv


def _check_pool(problem: Problem, pool: KVLayer) -> None:
    kv_heads, dim, v_dim = problem.k.shape[1], problem.k.shape[2], problem.v.shape[2]
    k_shape = (pool.num_blocks, kv_heads, -(-dim // 32) * 16, KV_BLOCK, 2)
    v_shape = (pool.num_blocks, kv_heads, -(-v_dim // 32), KV_BLOCK // 2, 32, 2)
    for name, x, shape in (("k", pool.k, k_shape), ("v", pool.v, v_shape)):
        if x.shape != shape or not x.is_contiguous() or x.dtype is not torch.bfloat16 or not x.is_cpu:
            raise ShapeError(
                f"pool.{name} is {x.dtype} {list(x.shape)} on {x.device}; "
                f"expected contiguous bfloat16 {list(shape)} on the CPU"
            )


def paged_attention(c: Context, problem: Problem, pool: KVLayer, batch: AttentionBatch) -> torch.Tensor:
    """Write k and v into the pool's slots, then attend through the block tables: out [T, Hq, Dv] bf16."""
    if batch.block_tables is None or batch.slots is None:
        raise ShapeError("paged_attention needs AttentionBatch.block_tables and slots, which are None")
    _check_pool(problem, pool)
    p = problem
    tables = batch.block_tables
    tables = checked("block_tables", tables, (batch.num_segments, None), torch.int32)
    slots = checked("slots", batch.slots, (p.k.shape[0],), torch.int64)
    out = torch.zeros(p.out_shape, dtype=torch.bfloat16)
    k_pool, v_pool, blocks = pool.k.data_ptr(), pool.v.data_ptr(), pool.num_blocks
    k, v = _rows(p.k), _rows(p.v)
    stride = tables.shape[1]
    try:
        _C.write_kv(c.handle, p.shape, k, v, slots.data_ptr(), k_pool, v_pool, blocks)
        _C.paged_attention(
            c.handle,
            p.shape,
            _rows(p.q),
            p.segments,
            k_pool,
            v_pool,
            blocks,
            tables.data_ptr(),
            stride,
            p.params,
            out.data_ptr(),
        )
    except ValueError as error:
        raise ShapeError(str(error)) from None
    return out
