from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_cases import CASES, Case, paged_batch, shared_prompt_batch, tables_for

from hetero.errors import ShapeError
from hetero.kernels import cpu, ops, reference
from hetero.kernels.batch import KV_BLOCK

LENGTHS = [1, 70, 32, 5, 33, 131]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error; absolute where the true value is 0."""
    return float((got.double() - want).norm() / max(want.norm(), 0.01))


def poisoned_pool(case: Case, num_blocks: int = 40) -> ops.KVLayer:
    """A pool whose blocks were left full of NaN by an earlier owner."""
    pool = ops.KVLayer.zeros(num_blocks, case.kv_heads, case.dim, case.v_dim)
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    return pool


def decode(case: Case, chunks: list[int]) -> torch.Tensor:
    """All of LENGTHS through the paged op, sequence s in chunks of chunks[s] tokens."""
    q, k, v = case.qkv(sum(LENGTHS))
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    tables, pool = tables_for(LENGTHS, 40), poisoned_pool(case)
    out = torch.full((sum(LENGTHS), case.heads, case.v_dim), math.nan, dtype=torch.bfloat16)
    done = [0] * len(LENGTHS)
    while any(d < length for d, length in zip(done, LENGTHS, strict=True)):
        live = [s for s, d in enumerate(done) if d < LENGTHS[s]]
        spans = [(s, done[s], min(done[s] + chunks[s], LENGTHS[s])) for s in live]
        rows = torch.cat([torch.arange(starts[s] + first, starts[s] + end) for s, first, end in spans])
        batch = paged_batch(tables, spans)
        out[rows] = ops.paged_attention(q[rows], k[rows], v[rows], pool, batch, **case.options())
        for s, _, end in spans:
            done[s] = end
    return out


@each_case
def test_forward(ctx: cpu.Context, case: Case) -> None:
    q, k, v = case.qkv(sum(LENGTHS))
    batch = ops.AttentionBatch.packed(LENGTHS)
    got = ops.attention(q, k, v, batch, **case.options())
    want = reference.attention(q.double(), k.double(), v.double(), batch, **case.options())
    assert got.dtype == torch.bfloat16
    assert error(got, want) < 4e-3


@each_case
def test_gradients(ctx: cpu.Context, case: Case) -> None:
    batch = shared_prompt_batch(45, [20, 1, 64])
    narrow = [t.requires_grad_() for t in case.qkv(45 + 85)]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    got = ops.attention(*narrow, batch, **case.options())
    want = reference.attention(*wide, batch, **case.options())
    dout = torch.randn(got.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    grads = torch.autograd.grad(got, narrow, dout)
    for grad, grad_want in zip(grads, torch.autograd.grad(want, wide, dout.double()), strict=True):
        assert error(grad, grad_want) < 1e-2


@each_case
def test_decode_prefill_and_training_agree_bit_for_bit(ctx: cpu.Context, case: Case) -> None:
    q, k, v = case.qkv(sum(LENGTHS))
    training = ops.attention(q, k, v, ops.AttentionBatch.packed(LENGTHS), **case.options())
    assert torch.equal(decode(case, [1000] * 6), training)
    assert torch.equal(decode(case, [1] * 6), training)
    assert torch.equal(decode(case, [7, 33, 1, 3, 32, 50]), training)


@each_case
def test_shared_prompts_change_no_bit(ctx: cpu.Context, case: Case) -> None:
    prompt, lengths = 45, [20, 1, 64]
    batch = shared_prompt_batch(prompt, lengths)
    q, k, v = case.qkv(prompt + sum(lengths))
    shared = ops.attention(q, k, v, batch, **case.options())
    for s in range(len(lengths)):
        own = torch.arange(int(batch.q_start[s + 1]), int(batch.q_start[s + 2]))
        rows = torch.cat([torch.arange(prompt), own])
        alone = ops.attention(
            q[rows], k[rows], v[rows], ops.AttentionBatch.packed([rows.numel()]), **case.options()
        )
        assert torch.equal(alone[:prompt], shared[:prompt])
        assert torch.equal(alone[prompt:], shared[own])


@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)
def test_threads_change_no_bit(ctx: cpu.Context, case: Case) -> None:
    batch = shared_prompt_batch(45, [20, 1, 64])
    results = []
    for threads in (1, 2, 3):
        with cpu.using(cpu.Context(threads, ctx.isa)):
            inputs = [t.requires_grad_() for t in case.qkv(45 + 85)]
            out = ops.attention(*inputs, batch, **case.options())
            results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gradient_of_shared_rows_is_the_sum_over_segments(ctx: cpu.Context) -> None:
    """64 equal completions of a prompt: its gradient is 64 times that of one, which bf16 sums would lose."""
    case, prompt, length, copies = Case(heads=2, kv_heads=1), 40, 8, 64
    q, k, v = case.qkv(prompt + length)
    rows = torch.cat([torch.arange(prompt), *([torch.arange(prompt, prompt + length)] * copies)])

    def gradient(index: torch.Tensor, batch: ops.AttentionBatch) -> torch.Tensor:
        inputs = [t[index].requires_grad_() for t in (q, k, v)]
        out = ops.attention(*inputs, batch, **case.options())
        return torch.autograd.grad(out[prompt:].float().sum(), inputs)[2][:prompt].float()

    one = gradient(torch.arange(prompt + length), shared_prompt_batch(prompt, [length]))
    many = gradient(rows, shared_prompt_batch(prompt, [length] * copies))
    assert error(many, copies * one.double()) < 1e-2


def test_strided_inputs_equal_contiguous_ones(ctx: cpu.Context) -> None:
    case = Case(heads=6, kv_heads=3)
    q, k, v = case.qkv(40)
    batch = ops.AttentionBatch.packed([40])
    want = ops.attention(q, k, v, batch, **case.options())
    by_head = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    assert torch.equal(ops.attention(*by_head, batch, **case.options()), want)
    fused = torch.cat([q, k, v], 1)
    sliced = [fused[:, :6], fused[:, 6:9], fused[:, 9:]]
    assert torch.equal(ops.attention(*sliced, batch, **case.options()), want)


def test_keys_may_have_rows_of_their_own(ctx: cpu.Context) -> None:
    """Queries for the last 5 of 70 positions only: the last rows of the whole."""
    case = Case()
    inputs = [t.requires_grad_() for t in case.qkv(70)]
    whole = ops.attention(*inputs, ops.AttentionBatch.packed([70]), **case.options())
    dout = torch.zeros_like(whole)
    dout[-5:] = torch.randn(5, *whole.shape[1:], generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(whole, inputs, dout)
    batch = dataclasses.replace(
        ops.AttentionBatch.packed([70]), q_start=torch.tensor([0, 5], dtype=torch.int32)
    )
    last = inputs[0].detach()[-5:].requires_grad_()
    out = ops.attention(last, *inputs[1:], batch, **case.options())
    assert torch.equal(out, whole[-5:])
    dq, dk, dv = torch.autograd.grad(out, [last, *inputs[1:]], dout[-5:])
    assert torch.equal(dq, want[0][-5:])
    assert error(dk, want[1]) < 1e-2
    assert error(dv, want[2]) < 1e-2


def test_blocks_before_the_window_may_be_given_away(ctx: cpu.Context) -> None:
    case = Case(window=40)
    q, k, v = case.qkv(130)
    tables, pool = tables_for([130], 8), poisoned_pool(case, 8)
    ops.paged_attention(q[:129], k[:129], v[:129], pool, paged_batch(tables, [(0, 0, 129)]), **case.options())
    tables[0, :2] = -1
    out = ops.paged_attention(
        q[129:], k[129:], v[129:], pool, paged_batch(tables, [(0, 129, 130)]), **case.options()
    )
    whole = ops.attention(q, k, v, ops.AttentionBatch.packed([130]), **case.options())
    assert torch.equal(out, whole[129:])


def test_extreme_scores_stay_finite(ctx: cpu.Context) -> None:
    case = Case(heads=2, kv_heads=1)
    q, k, v = (t * 100 for t in case.qkv(50))
    inputs = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    out = ops.attention(*inputs, ops.AttentionBatch.packed([50]), **case.options())
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(torch.isfinite(t).all() for t in (out, *grads))


def test_rows_of_no_segment_are_zero(ctx: cpu.Context) -> None:
    case = Case()
    inputs = [t.requires_grad_() for t in case.qkv(20)]
    batch = ops.AttentionBatch.packed([12])
    out = ops.attention(*inputs, batch, **case.options())
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all((t[12:] == 0).all() for t in (out, *grads))


def test_write_kv_fills_the_layout_of_the_reference(ctx: cpu.Context) -> None:
    case = Case(dim=13, v_dim=7)
    q, k, v = case.qkv(40)
    tables = tables_for([40], 3)
    batch = paged_batch(tables, [(0, 0, 40)])
    pool, other = (ops.KVLayer.zeros(3, case.kv_heads, case.dim, case.v_dim) for _ in range(2))
    ops.paged_attention(q, k, v, pool, batch, 1.0)
    assert batch.slots is not None
    reference.write_kv(k, v, other, batch.slots)
    assert torch.equal(pool.k, other.k)
    assert torch.equal(pool.v, other.v)
    keys, values = reference.read_kv(pool, tables[0], 40)
    assert torch.equal(keys[..., :13], k)
    assert torch.equal(values[..., :7], v)
    pool.copy_block(int(tables[0, 0]), int(tables[0, 1]))
    assert torch.equal(pool.k[tables[0, 1]], pool.k[tables[0, 0]])


def test_mistakes_are_named() -> None:
    case = Case()
    q, k, v = case.qkv(40)
    good = ops.AttentionBatch.packed([40])
    for change, message in [
        ({"kv_len": torch.tensor([41], dtype=torch.int32)}, "kv_len 41 but kv_start gives it"),
        ({"q_start": torch.tensor([0, 41], dtype=torch.int32)}, "query rows 0 to 41 of 40"),
        ({"kv_rows": torch.arange(1, 41, dtype=torch.int32)}, r"kv_rows\[39\] is 40"),
        ({"kv_rows": None}, "needs the training layout"),
        ({"kv_len": torch.tensor([40])}, r"expected \[1\] int32"),
    ]:
        with pytest.raises(ShapeError, match=message):
            ops.attention(q, k, v, dataclasses.replace(good, **change), 1.0)
    for bad in [(q[:, :3], k, v), (q.float(), k, v), (q, k[:39], v), (q, k, v[:, :1]), (q[..., :8], k, v)]:
        with pytest.raises(ShapeError, match="expected"):
            ops.attention(*bad, good, 1.0)
    pool = ops.KVLayer.zeros(4, case.kv_heads, case.dim, case.v_dim)
    paged = paged_batch(torch.tensor([[0, 1]], dtype=torch.int32), [(0, 0, 40)])
    assert paged.slots is not None
    for change, message in [
        ({"slots": paged.slots + 4 * KV_BLOCK}, r"slots\[0\] is 128"),
        ({"block_tables": torch.tensor([[0, 4]], dtype=torch.int32)}, r"block_tables\[0, 1\] is 4"),
        ({"block_tables": torch.tensor([[0]], dtype=torch.int32)}, "needs 2 blocks"),
        ({"slots": None}, "needs AttentionBatch.block_tables and slots"),
    ]:
        with pytest.raises(ShapeError, match=message):
            ops.paged_attention(q, k, v, pool, dataclasses.replace(paged, **change), 1.0)
    with pytest.raises(ShapeError, match=r"pool\.k"):
        ops.paged_attention(q, k, v, ops.KVLayer.zeros(4, 1, 64, 64), paged, 1.0)
    with pytest.raises(ShapeError, match="window is 0"):
        ops.attention(q, k, v, good, 1.0, window=0)


def test_empty_batches(ctx: cpu.Context) -> None:
    q, k, v = Case().qkv(0)
    assert ops.attention(q, k, v, ops.AttentionBatch.packed([]), 1.0).shape == (0, 4, 64)
