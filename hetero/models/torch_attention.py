"""Attention in PyTorch with the signatures of the kernels: for dense parts on a GPU, and selectable on the
CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hetero.errors import ShapeError
from hetero.kernels.batch import KV_BLOCK, AttentionBatch, KVLayer

SCORE_BUDGET = 1 << 28
"""Most scores (heads x queries x keys) that one call to PyTorch makes."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv] -> [T, Hq, Dv]; see `hetero.kernels.ops.attention`."""
    if batch.kv_rows is None or batch.kv_start is None:
        raise ShapeError("attention needs AttentionBatch.kv_rows and kv_start (the training layout)")
    starts = batch.kv_start.tolist()
    rows = batch.kv_rows.to(q.device, torch.int64)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for group in _groups(batch, q.shape[1]):
        longest = max(starts[s + 1] - starts[s] for s in group)
        table = torch.stack(
            [functional.pad(rows[starts[s] : starts[s + 1]], (0, longest))[:longest] for s in group]
        )
        out = _attend_group(q, k[table], v[table], batch, group, out, scale, window, softcap, sinks)
    return out


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: KVLayer,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the new k [T, Hkv, D] and v [T, Hkv, Dv] into their slots, then attend; see
    `hetero.kernels.ops`."""
    if batch.block_tables is None or batch.slots is None:
        raise ShapeError("paged_attention needs AttentionBatch.block_tables and slots (the engine layout)")
    write_kv(k, v, pool, batch.slots)
    tables = batch.block_tables.to(q.device, torch.int64)
    lengths = batch.kv_len.tolist()
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for group in _groups(batch, q.shape[1]):
        num_blocks = max(-(-lengths[s] // KV_BLOCK) for s in group)
        keys, values = read_kv(pool, tables[group, :num_blocks].clamp(min=0))
        keys, values = keys[..., : k.shape[2]].to(q.dtype), values[..., : v.shape[2]].to(q.dtype)
        out = _attend_group(q, keys, values, batch, group, out, scale, window, softcap, sinks)
    return out


def write_kv(k: Tensor, v: Tensor, pool: KVLayer, slots: Tensor) -> None:
    """Store k [T, Hkv, D] and v [T, Hkv, Dv] at slots [T] (in RAM) of the pool's panel layout.

    The token at offset 0 clears its block first, so that nothing of an earlier owner, NaN included, is left.
    """
    block, offset = slots // KV_BLOCK, slots % KV_BLOCK
    begun = block[offset == 0].to(k.device)
    block, offset = block.to(k.device), offset.to(k.device)
    pool.k.index_fill_(0, begun, 0)
    pool.v.index_fill_(0, begun, 0)
    pairs, panels = pool.k.shape[2], pool.v.shape[2]
    keys = functional.pad(k, (0, 2 * pairs - k.shape[2])).unflatten(-1, (pairs, 2))
    pool.k[block, :, :, offset] = keys.to(pool.k.dtype)
    values = functional.pad(v, (0, 32 * panels - v.shape[2])).unflatten(-1, (panels, 32))
    pool.v[block, :, :, offset // 2, :, offset % 2] = values.to(pool.v.dtype)


def read_kv(pool: KVLayer, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [S, 32 B, Hkv, Dpad] and values [S, 32 B, Hkv, Dvpad] of block tables [S, B]."""
    keys = pool.k[tables].permute(0, 1, 4, 2, 3, 5).flatten(4, 5).flatten(1, 2)
    values = pool.v[tables].permute(0, 1, 4, 6, 2, 3, 5).flatten(5, 6).flatten(1, 3)
    return keys, values


def _groups(batch: AttentionBatch, num_heads: int) -> Iterator[list[int]]:
    """Segments that are attended together: similar lengths, a bounded number of scores."""
    q_lengths, kv_lengths = batch.q_start.diff().tolist(), batch.kv_len.tolist()
    order = sorted(
        (s for s in range(len(kv_lengths)) if q_lengths[s]), key=lambda s: (q_lengths[s], kv_lengths[s])
    )
    group: list[int] = []
    longest_q = longest_kv = 0
    for s in order:
        longest_q, longest_kv = max(longest_q, q_lengths[s]), max(longest_kv, kv_lengths[s])
        if group and (len(group) + 1) * num_heads * longest_q * longest_kv > SCORE_BUDGET:
            yield group
            group, longest_q, longest_kv = [], q_lengths[s], kv_lengths[s]
        group.append(s)
    if group:
        yield group


def _attend_group(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    group: list[int],
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend the segments of `group` over keys [G, L, Hkv, D] and values [G, L, Hkv, Dv]; returns `out` with
    their rows."""
    q_start = batch.q_start.to(q.device, torch.int64)
    first, count = q_start[group], q_start.diff()[group]
    index = torch.arange(int(count.max()), device=q.device)
    valid = index < count[:, None]
    rows = torch.where(valid, first[:, None] + index, first[:, None])
    kv_len = batch.kv_len.to(q.device, torch.int64)[group]
    q_pos = (kv_len - count)[:, None] + index
    k_pos = torch.arange(keys.shape[1], device=q.device)
    visible = k_pos <= q_pos[..., None]
    if window is not None:
        visible &= k_pos > q_pos[..., None] - window
    got = _softmax_attention(q[rows], keys, values, visible[:, None], scale, softcap, sinks)
    return out.index_copy(0, rows[valid], got[valid].to(out.dtype))


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [G, Q, Hq, D], k [G, L, Hkv, D], v [G, L, Hkv, Dv], visible [G, 1, Q, L] -> [G, Q, Hq, Dv]."""
    repeat = q.shape[2] // k.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
        return out.transpose(1, 2)
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2)
