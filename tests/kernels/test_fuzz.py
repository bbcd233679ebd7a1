"""Random shapes through every kernel, format and operation. `make sanitize` runs many rounds of it under
AddressSanitizer and UndefinedBehaviorSanitizer; here some rounds check what must hold for any shape.

What is checked is cheap and general: bits depend neither on the number of threads nor on the other rows, a
row that is not a number spoils itself alone, results are near those of the dequantised weights in fp32.
"""

from __future__ import annotations

import os
from random import Random

import pytest
import torch
from attention_cases import Case, paged_batch, shared_prompt_batch, tables_for
from expert_cases import bf16, relative
from torch import Tensor

from hetero.experts import ExpertStore
from hetero.formats import FORMATS, packing
from hetero.kernels import cpu, ops, reference

ROUNDS = int(os.environ.get("HETERO_FUZZ_ROUNDS", "2"))
QUANTISED = [name for name, row in FORMATS.items() if not row.imported]
SIZES = (1, 2, 7, 16, 31, 32, 33, 47, 63, 64, 65, 97, 128, 131, 160, 200, 250)
ROWS = (0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 70)

pytestmark = pytest.mark.parametrize("seed", range(ROUNDS))


def other_threads(ctx: cpu.Context) -> cpu.Context:
    return cpu.Context(3, ctx.isa)


def spoiled(x: Tensor, rng: Random) -> tuple[Tensor, int]:
    """x [T, ..] with one row that is not a number, and which."""
    row = rng.randrange(x.shape[0])
    copy = x.clone()
    copy[row] = rng.choice([float("nan"), float("inf")])
    return copy, row


def some_rows(t: int, rng: Random) -> Tensor:
    """Some of t rows, in any order."""
    return torch.tensor(rng.sample(range(t), rng.randrange(1, t + 1)))


def all_but(x: Tensor, row: int) -> Tensor:
    return torch.cat([x[:row], x[row + 1 :]])


@pytest.mark.parametrize("format", QUANTISED)
def test_linear(ctx: cpu.Context, format: str, seed: int) -> None:
    rng = Random(f"{format} {seed}")
    for _ in range(4):
        n, k, t, rank = rng.choice(SIZES), rng.choice(SIZES), rng.choice(ROWS), rng.choice([0, 1, 5, 33])
        weight = cpu.pack(bf16(n, k, scale=k**-0.5, seed=seed), packing=packing(format))
        bias = bf16(n) if rng.random() < 0.5 else None
        lora = None
        if rank:
            a, b = bf16(rank, k, scale=k**-0.5).requires_grad_(), bf16(n, rank).requires_grad_()
            lora = ops.LoraFactors(a, b, 0.5)
        x, dy = bf16(t, k, seed=seed + 1).requires_grad_(), bf16(t, n, seed=seed + 2)
        factors = (a, b) if rank else ()
        y = ops.linear(x, weight, bias, lora)
        got = (y, *torch.autograd.grad(y, (x, *factors), dy))
        with cpu.using(other_threads(ctx)):
            y = ops.linear(x, weight, bias, lora)
            again = (y, *torch.autograd.grad(y, (x, *factors), dy))
        assert all(map(torch.equal, got, again))
        low_rank = (a, b, 0.5) if rank else None
        want = reference.linear(x.detach(), weight.unpack().float(), bias, low_rank)
        assert relative(got[0], want) < 0.01
        if t:
            few = some_rows(t, rng)
            assert torch.equal(ops.linear(x[few], weight, bias, lora), y[few])
            bad, row = spoiled(x.detach(), rng)
            assert torch.equal(all_but(ops.linear(bad, weight, bias, lora), row), all_but(got[0], row))


def routing(rng: Random, t: int, k: int, e: int) -> Tensor:
    """Ids [t, k]: skipped ones, repeated ones, all to one expert, or as they come."""
    kind = rng.choice(["any", "one", "none", "skips"])
    if kind in ("one", "none"):
        return torch.full((t, k), rng.randrange(e) if kind == "one" else -1)
    low = -1 if kind == "skips" else 0
    return torch.tensor([[rng.randrange(low, e) for _ in range(k)] for _ in range(t)], dtype=torch.long).view(
        t, k
    )


def expert_factors(rng: Random, e: int, h: int, i: int) -> ops.ExpertLoraFactors | None:
    rank = rng.choice([0, 1, 5, 8, 33])
    if not rank:
        return None
    outer = (e,) if rng.random() < 0.5 else ()
    shapes = {
        "gate_a": (*outer, rank, h),
        "gate_b": (e, i, rank),
        "up_a": (*outer, rank, h),
        "up_b": (e, i, rank),
        "down_a": (e, rank, i),
        "down_b": (*outer, h, rank),
    }
    wanted = rng.choice([("gate", "up", "down"), ("down",), ("gate",), ("up", "down")])
    made = {
        name: bf16(*shape, scale=shape[-1] ** -0.5).requires_grad_()
        for name, shape in shapes.items()
        if name.split("_")[0] in wanted
    }
    return ops.ExpertLoraFactors(**made, scale=0.5)


@pytest.mark.parametrize("format", QUANTISED)
def test_experts(ctx: cpu.Context, format: str, seed: int) -> None:
    rng = Random(f"experts {format} {seed}")
    for _ in range(3):
        e, k = rng.choice([1, 2, 5, 9]), rng.choice([1, 2, 4])
        h, i, t = rng.choice(SIZES), rng.choice(SIZES), rng.choice(ROWS)
        biases = [bf16(e, 2 * i), bf16(e, h)] if rng.random() < 0.5 else [None, None]
        activation = rng.choice(["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
        store = ExpertStore.from_tensors(
            bf16(e, 2 * i, h, scale=h**-0.5, seed=seed),
            bf16(e, h, i, scale=i**-0.5, seed=seed + 1),
            format,
            activation=activation,
            gate_up_bias=biases[0],
            down_bias=biases[1],
        )
        lora, keep = expert_factors(rng, e, h, i), rng.random() < 0.5
        factors = [] if lora is None else [f for f in lora.tensors() if f is not None]
        ids, weights = routing(rng, t, k, e), torch.rand(t, k).requires_grad_()
        x, dout = bf16(t, h, seed=seed + 2).requires_grad_(), bf16(t, h, seed=seed + 3)

        def run(x: Tensor, rows: Tensor | slice = slice(None)) -> list[Tensor]:
            own = weights[rows]  # noqa: B023
            out = ops.experts(store, x, ids[rows], own, lora, keep=keep)  # noqa: B023
            return [out, *torch.autograd.grad(out, (x, own, *factors), dout[rows])]  # noqa: B023

        got = run(x)
        with cpu.using(other_threads(ctx)):
            assert all(map(torch.equal, got, run(x)))
        assert all(bool(value.isfinite().all()) for value in got)
        if lora is None:
            gate_up, down = (part.float() for part in store.dequantize())
            named = {"gate_up_bias": biases[0], "down_bias": biases[1], "activation": activation}
            want = reference.experts(gate_up, down, x.detach(), ids, weights.detach(), **named)
            assert relative(got[0], want) < 0.015
        if t:
            few = some_rows(t, rng)
            part = run(x.detach()[few].requires_grad_(), few)
            assert all(torch.equal(a, b[few]) for a, b in zip(part[:3], got[:3], strict=False))
            bad, row = spoiled(x.detach(), rng)
            after = run(bad.requires_grad_())
            for before, now in zip(got[:3], after[:3], strict=True):
                assert torch.equal(all_but(now, row), all_but(before, row))


def attention_case(rng: Random) -> Case:
    heads = rng.choice([1, 2, 3])
    return Case(
        heads=heads * rng.choice([1, 2, 5]),
        kv_heads=heads,
        dim=rng.choice([1, 13, 32, 40, 64, 80]),
        v_dim=rng.choice([1, 7, 32, 64, 72]),
        window=rng.choice([None, None, 1, 31, 45]),
        softcap=rng.choice([None, 5.0]),
        sinks=rng.random() < 0.3,
    )


def test_attention(ctx: cpu.Context, seed: int) -> None:
    rng = Random(f"attention {seed}")
    for _ in range(6):
        case = attention_case(rng)
        batch = shared_prompt_batch(
            rng.randrange(1, 70), [rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))]
        )
        q, k, v = (x.requires_grad_() for x in case.qkv(int(batch.q_start[-1]), seed))

        def run() -> list[Tensor]:
            out = ops.attention(q, k, v, batch, **case.options())  # type: ignore[arg-type]  # noqa: B023
            return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]  # noqa: B023

        got = run()
        with cpu.using(other_threads(ctx)):
            assert all(map(torch.equal, got, run()))
        assert all(bool(value.isfinite().all()) for value in got)


def test_paged_attention(ctx: cpu.Context, seed: int) -> None:
    rng = Random(f"paged {seed}")
    for _ in range(6):
        case = attention_case(rng)
        lengths = [rng.randrange(1, 90) for _ in range(rng.randrange(1, 5))]
        tables = tables_for(lengths, 16, seed)
        pool = ops.KVLayer.zeros(16, case.kv_heads, case.dim, case.v_dim)
        for pieces in (1, 3):  # again, in chunks over what is there: the same bits
            outs = []
            for s, length in enumerate(lengths):
                q, k, v = case.qkv(length, s)
                ends = sorted({length * (i + 1) // pieces for i in range(pieces)} - {0})
                for first, end in zip([0, *ends[:-1]], ends, strict=True):
                    batch = paged_batch(tables, [(s, first, end)])
                    part = (x[first:end] for x in (q, k, v))
                    outs.append(ops.paged_attention(*part, pool, batch, **case.options()))  # type: ignore[arg-type]
            if pieces == 1:
                whole = torch.cat(outs)
        assert torch.equal(torch.cat(outs), whole)


def test_rows(ctx: cpu.Context, seed: int) -> None:
    rng = Random(f"rows {seed}")
    for _ in range(12):
        t, n, dtype = rng.choice(ROWS), rng.choice(SIZES), rng.choice([torch.float32, torch.bfloat16])
        x, up = bf16(t, n, seed=seed).to(dtype), bf16(t, n, seed=seed + 1).to(dtype)
        kind = rng.choice(["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
        operations = {
            "norm": lambda x: ops.rms_norm(x, torch.ones(x.shape[1]), 1e-6),
            "activation": lambda x: ops.activation(x, kind),  # noqa: B023
            "gated": lambda x: ops.gated_activation(x, up, kind),  # noqa: B023
            "softmax": ops.softmax,
        }
        for operation in operations.values():
            leaf = x.clone().requires_grad_()
            out = operation(leaf)
            out.backward(torch.ones_like(out))
            assert leaf.grad is not None
            assert bool(out.isfinite().all() and leaf.grad.isfinite().all())
            if t:
                bad, row = spoiled(x, rng)
                assert torch.equal(all_but(operation(bad), row), all_but(out, row))
        values, ids = ops.topk(x.float(), 1 + rng.randrange(n))
        assert torch.equal(values, x.float().gather(1, ids))


def test_head(ctx: cpu.Context, seed: int) -> None:
    rng = Random(f"head {seed}")
    for _ in range(4):
        t, h, vocab = rng.choice(ROWS), rng.choice(SIZES), rng.choice([2, 33, 257, 1000])
        weight = cpu.pack(bf16(vocab, h, scale=h**-0.5, seed=seed))
        hidden = bf16(t, h, seed=seed + 1).requires_grad_()
        targets = torch.tensor([rng.randrange(vocab) for _ in range(t)], dtype=torch.long)
        softcap = rng.choice([None, 20.0])
        logp, entropy = ops.token_logprobs(hidden, weight, targets, 0.7, softcap=softcap)
        logp.sum().backward()
        assert hidden.grad is not None
        assert bool(logp.isfinite().all() and entropy.isfinite().all() and hidden.grad.isfinite().all())
        logits = ops.head_logits(hidden.detach(), weight, softcap=softcap)
        ones = torch.ones(t)
        keys = torch.tensor([[seed, row, 0, 0] for row in range(t)], dtype=torch.int64).view(t, 4)
        options = (0.7 * ones, 0.9 * ones, torch.full((t,), rng.randrange(3)), 0.01 * ones)
        tokens, sampled, raw = ops.sample(logits, *options, keys)
        assert bool(((tokens >= 0) & (tokens < vocab)).all())
        assert bool(sampled.isfinite().all() and raw.isfinite().all())
