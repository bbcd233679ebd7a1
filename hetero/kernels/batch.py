"""What attention needs to know about a packed batch, and how a layer's KV cache is laid out.

The T tokens of a batch lie on one packed axis. A segment is a run of consecutive query rows that belong to
one sequence; its keys and values are either rows of the same packed axis (training) or blocks of a KV pool
(engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.errors import ShapeError

KV_BLOCK = 32
"""Tokens in one KV block. Attention walks KV in blocks aligned to position 0: part of the numerics."""


@dataclass(slots=True)
class AttentionBatch:
    """Segments of a packed batch: S segments, T query rows.

    Attributes:
        q_start: [S + 1] int32, segment s owns the query rows q_start[s] to q_start[s + 1].
        kv_len: [S] int32, positions visible to the LAST query of the segment. Query i of segment s stands at
            position kv_len[s] - q_len[s] + i and sees the positions up to its own.
        kv_rows: training: [sum(kv_len)] int32, the packed row that holds position p of segment s, at
            kv_start[s] + p. Segments that share a prompt list the same rows.
        kv_start: training: [S + 1] int32.
        block_tables: engine: [S, max_blocks] int32, the pool block that holds positions 32 b to 32 b + 31.
        slots: engine: [T] int64, block * 32 + offset where the key and value of each new token go.
    """

    q_start: torch.Tensor
    kv_len: torch.Tensor
    kv_rows: torch.Tensor | None = None
    kv_start: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    slots: torch.Tensor | None = None

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> AttentionBatch:
        """Independent sequences laid end to end, each seeing only itself (training layout)."""
        if any(length < 1 for length in lengths):
            raise ShapeError(f"every sequence needs at least one token, got lengths {list(lengths)}")
        kv_len = torch.tensor(list(lengths), dtype=torch.int32)
        start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        start[1:] = kv_len.cumsum(0)
        rows = torch.arange(int(start[-1]), dtype=torch.int32)
        return cls(q_start=start, kv_len=kv_len, kv_rows=rows, kv_start=start)

    @property
    def num_segments(self) -> int:
        return self.kv_len.numel()


@dataclass(slots=True)
class KVLayer:
    """The KV pool of one layer. Dpad and Dvpad are the head dimensions rounded up to multiples of 32.

    What lies under the causal mask is multiplied by 0, so it must be finite whatever an earlier owner of the
    block left there: whoever writes the token at offset 0 clears the block first.

    Attributes:
        k: [num_blocks, Hkv, Dpad / 2, 32, 2] bf16: (dim pair, token, parity).
        v: [num_blocks, Hkv, Dvpad / 32, 16, 32, 2] bf16: (dim panel, token pair, dim, token parity).
    """

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def zeros(cls, num_blocks: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> KVLayer:
        """A pool of zeroed blocks."""
        k_pad, v_pad = -(-head_dim // 32) * 32, -(-v_head_dim // 32) * 32
        return cls(
            k=torch.zeros(num_blocks, num_kv_heads, k_pad // 2, KV_BLOCK, 2, dtype=torch.bfloat16),
            v=torch.zeros(num_blocks, num_kv_heads, v_pad // 32, KV_BLOCK // 2, 32, 2, dtype=torch.bfloat16),
        )

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def bytes_per_block(self) -> int:
        return (self.k[0].numel() + self.v[0].numel()) * 2

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one block over another (copy on write of a shared partial block)."""
        self.k[dst].copy_(self.k[src])
        self.v[dst].copy_(self.v[src])
