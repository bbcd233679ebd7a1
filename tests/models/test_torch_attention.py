"""Attention in PyTorch against the reference: packed and paged, every option, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetero.errors import ShapeError
from hetero.kernels import reference
from hetero.kernels.batch import AttentionBatch, KVLayer
from hetero.models import torch_attention

OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "all": {"window": 6, "softcap": 3.0, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


def inputs(rows: int, kv_heads: int = 2, d: int = 12, dv: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 4, d), (rows, kv_heads, d), (rows, kv_heads, dv))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("budget", [1 << 28, 64])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_packed_attention(monkeypatch: pytest.MonkeyPatch, option: str, budget: int) -> None:
    monkeypatch.setattr(torch_attention, "SCORE_BUDGET", budget)
    # Two segments share the first six rows as their prompt; row 20 belongs to nobody.
    batch = AttentionBatch(
        q_start=torch.tensor([0, 6, 13, 20], dtype=torch.int32),
        kv_len=torch.tensor([6, 13, 13], dtype=torch.int32),
        kv_rows=torch.tensor([*range(6), *range(13), *range(6), *range(13, 20)], dtype=torch.int32),
        kv_start=torch.tensor([0, 6, 19, 32], dtype=torch.int32),
    )
    results = []
    for attention in (torch_attention.attention, reference.attention):
        leaves = [x.requires_grad_() for x in inputs(21)]
        out = attention(*leaves, batch, scale=0.3, **OPTIONS[option])
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_paged_attention(option: str) -> None:
    lengths, new = [40, 33, 3], [2, 33, 1]
    tables = torch.tensor([[4, 0], [2, 5], [1, -1]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    pools = [KVLayer.zeros(6, 2, 12, 20) for _ in range(2)]
    for mine, theirs in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
        theirs.copy_(torch.randn(mine.shape, generator=generator))
        mine.copy_(theirs)
    slots = []
    for length, count, table in zip(lengths, new, tables.tolist(), strict=True):
        slots += [table[p // 32] * 32 + p % 32 for p in range(length - count, length)]
    batch = AttentionBatch(
        q_start=torch.tensor([0, 2, 35, 36], dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        slots=torch.tensor(slots),
    )
    q, k, v = inputs(36)
    got = torch_attention.paged_attention(q, k, v, pools[0], batch, 0.3, **OPTIONS[option])
    want = reference.paged_attention(q, k, v, pools[1], batch, 0.3, **OPTIONS[option])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(pools[0].k, pools[1].k)
    assert torch.equal(pools[0].v, pools[1].v)


def test_what_an_earlier_owner_left_in_a_block_reaches_nobody() -> None:
    pool = KVLayer.zeros(2, 2, 12, 20)
    pool.k.fill_(float("nan"))
    pool.v.fill_(float("nan"))
    q, k, v = inputs(5)
    batch = AttentionBatch(
        q_start=torch.tensor([0, 5], dtype=torch.int32),
        kv_len=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slots=torch.arange(32, 37),
    )
    assert torch_attention.paged_attention(q, k, v, pool, batch, 0.3).isfinite().all()
    assert pool.k[0].isnan().all()


def test_the_wrong_layout_is_refused() -> None:
    q, k, v = inputs(3)
    batch = AttentionBatch(torch.tensor([0, 3]), torch.tensor([3]))
    with pytest.raises(ShapeError, match="training layout"):
        torch_attention.attention(q, k, v, batch, 1.0)
    with pytest.raises(ShapeError, match="engine layout"):
        torch_attention.paged_attention(q, k, v, KVLayer.zeros(1, 2, 12, 20), batch, 1.0)
