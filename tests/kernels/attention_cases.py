"""Attention problems that the attention tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.kernels import ops
from hetero.kernels.batch import KV_BLOCK


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return (
            f"{self.heads}h{self.kv_heads}-d{self.dim}-{self.v_dim}"
            f"{f'-w{self.window}' if self.window else ''}{'-cap' if self.softcap else ''}"
            f"{'-sinks' if self.sinks else ''}"
        )

    def options(self) -> dict[str, object]:
        sinks = torch.linspace(-1, 2, self.heads) if self.sinks else None
        return {
            "scale": self.dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": sinks,
        }

    def qkv(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.v_dim))
        q, k, v = (torch.randn(tokens, *shape, generator=generator).bfloat16() for shape in shapes)
        return q * 2, k, v


CASES = [
    Case(),
    Case(heads=9, kv_heads=3),
    Case(heads=8, kv_heads=1, dim=80, v_dim=80),
    Case(heads=2, kv_heads=2, dim=96, v_dim=96),
    Case(heads=16, kv_heads=2, dim=128, v_dim=128),
    Case(heads=2, kv_heads=2, dim=192, v_dim=128),
    Case(heads=3, kv_heads=1, dim=13, v_dim=7),
    Case(window=1),
    Case(window=32),
    Case(window=45, softcap=5.0),
    Case(softcap=20.0, dim=80, v_dim=80),
    Case(sinks=True, heads=8, kv_heads=1),
    Case(sinks=True, window=37, softcap=4.0, heads=6, dim=40, v_dim=72),
]


def tables_for(lengths: Sequence[int], num_blocks: int, seed: int = 0) -> torch.Tensor:
    """Block tables [S, max_blocks] over a shuffled pool; entries behind a sequence's end are -1."""
    counts = [-(-length // KV_BLOCK) for length in lengths]
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    for s, count in enumerate(counts):
        for b in range(count):
            tables[s, b] = free.pop()
    return tables


def paged_batch(tables: torch.Tensor, spans: Sequence[tuple[int, int, int]]) -> ops.AttentionBatch:
    """Engine batch of (sequence, first position, end position) spans, one segment each."""
    slots = [
        int(tables[s, p // KV_BLOCK]) * KV_BLOCK + p % KV_BLOCK
        for s, first, end in spans
        for p in range(first, end)
    ]
    lengths = [0] + [end - first for _, first, end in spans]
    return ops.AttentionBatch(
        q_start=torch.tensor(lengths).cumsum(0).int(),
        kv_len=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
        block_tables=tables[[s for s, _, _ in spans]],
        slots=torch.tensor(slots),
    )


def shared_prompt_batch(prompt: int, lengths: Sequence[int]) -> ops.AttentionBatch:
    """Training batch: the prompt's rows once, then completions that list them as their first positions."""
    starts = torch.tensor([0, prompt, *lengths]).cumsum(0)
    rows = [torch.arange(prompt)]
    rows += [
        torch.cat([torch.arange(prompt), torch.arange(int(starts[i + 1]), int(starts[i + 2]))])
        for i in range(len(lengths))
    ]
    kv_len = torch.tensor([row.numel() for row in rows])
    return ops.AttentionBatch(
        q_start=starts.int(),
        kv_len=kv_len.int(),
        kv_rows=torch.cat(rows).int(),
        kv_start=torch.cat([torch.zeros(1, dtype=torch.long), kv_len.cumsum(0)]).int(),
    )
