"""Attention over packed segments in plain PyTorch: the oracle of the tests."""

from __future__ import annotations

import torch

from hetero.errors import ShapeError
from hetero.kernels.batch import KV_BLOCK, AttentionBatch, KVLayer


def _segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [n, Hq, D] at the last n positions of k [L, Hkv, D], v [L, Hkv, Dv] -> [n, Hq, Dv]."""
    n, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    q_pos = torch.arange(length - n, length)[:, None]
    k_pos = torch.arange(length)[None, :]
    visible = k_pos <= q_pos
    if window is not None:
        visible &= k_pos > q_pos - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(num_heads, n, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, values)


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
    """Causal attention of every segment of the training layout, in the dtype of q.

    Args:
        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv].
        window: a query at position p sees positions p - window + 1 to p.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [Hq], one extra logit per head that takes part in the softmax and carries no value.

    Returns:
        [T, Hq, Dv]; rows that belong to no segment are zero.
    """
    if batch.kv_rows is None or batch.kv_start is None:
        raise ShapeError("attention needs the training layout: AttentionBatch.kv_rows and kv_start are None")
    pieces = [q.new_zeros(q.shape[0], q.shape[1], v.shape[2])]
    rows = []
    for s in range(batch.num_segments):
        q_rows = torch.arange(int(batch.q_start[s]), int(batch.q_start[s + 1]))
        kv = batch.kv_rows[int(batch.kv_start[s]) : int(batch.kv_start[s + 1])].long()
        pieces.append(_segment(q[q_rows], k[kv], v[kv], scale, window, softcap, sinks))
        rows.append(q_rows)
    if not rows:
        return pieces[0]
    return pieces[0].index_copy(0, torch.cat(rows), torch.cat(pieces[1:]))


def write_kv(k: torch.Tensor, v: torch.Tensor, pool: KVLayer, slots: torch.Tensor) -> None:
    """Put the keys k [T, Hkv, D] and values v [T, Hkv, Dv] of new tokens into their slots of the pool; the
    token at offset 0 clears its block first."""
    d, dv = k.shape[2], v.shape[2]
    places = [divmod(slot, KV_BLOCK) for slot in slots.tolist()]
    for block in [block for block, offset in places if offset == 0]:
        pool.k[block], pool.v[block] = 0, 0
    for t, (block, offset) in enumerate(places):
        keys = pool.k[block].permute(0, 2, 1, 3)  # [Hkv, token, pair, parity]
        keys[:, offset] = torch.nn.functional.pad(k[t], (0, keys.shape[2] * 2 - d)).unflatten(-1, (-1, 2))
        values = pool.v[block].permute(0, 2, 4, 1, 3).flatten(1, 2)  # [Hkv, token, panel, dim] (a copy)
        values[:, offset] = torch.nn.functional.pad(v[t], (0, values.shape[2] * 32 - dv)).unflatten(
            -1, (-1, 32)
        )
        pool.v[block] = values.unflatten(1, (KV_BLOCK // 2, 2)).permute(0, 3, 1, 4, 2)


def read_kv(pool: KVLayer, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys [length, Hkv, Dpad] and values [length, Hkv, Dvpad] of a block table [B]."""
    blocks = table[: -(-length // KV_BLOCK)].long()
    k = pool.k[blocks].permute(0, 3, 1, 2, 4).flatten(3, 4).flatten(0, 1)
    v = pool.v[blocks].permute(0, 3, 5, 1, 2, 4).flatten(4, 5).flatten(0, 2)
    return k[:length], v[:length]


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
    """Write the new keys and values into the pool, then attend through the block tables (engine layout)."""
    if batch.block_tables is None or batch.slots is None:
        raise ShapeError("paged_attention needs AttentionBatch.block_tables and slots, which are None")
    write_kv(k, v, pool, batch.slots)
    d, dv = q.shape[2], v.shape[2]
    out = q.new_zeros(q.shape[0], q.shape[1], dv)
    for s in range(batch.num_segments):
        rows = slice(int(batch.q_start[s]), int(batch.q_start[s + 1]))
        keys, values = read_kv(pool, batch.block_tables[s], int(batch.kv_len[s]))
        keys, values = keys[..., :d].to(q.dtype), values[..., :dv].to(q.dtype)
        out[rows] = _segment(q[rows], keys, values, scale, window, softcap, sinks)
    return out
