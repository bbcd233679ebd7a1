"""Rows of several adapter versions in one call: every row has the bits that its version gives it alone."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Layer, Tokens, bf16

from hetero.errors import ShapeError
from hetero.formats import packing as packing_of
from hetero.kernels import cpu, ops

Runs = list[tuple[int, int]]
CUTS: list[Runs] = [  # (version, rows); -1 has no adapter
    [(0, 4), (1, 7)],
    [(1, 1), (-1, 3), (0, 1), (2, 6)],
    [(-1, 5), (2, 6)],
    [(0, 0), (2, 11), (1, 0)],
    [(-1, 11)],
]


def ends(runs: Runs) -> tuple[int, ...]:
    return tuple(sum(rows for _, rows in runs[: i + 1]) for i in range(len(runs)))


def linear_versions(n: int, k: int, rank: int) -> list[ops.LoraFactors]:
    return [
        ops.LoraFactors(bf16(rank, k, scale=k**-0.5, seed=s), bf16(n, rank, seed=s + 9), 0.3)
        for s in range(3)
    ]


def expert_versions(
    layer: Layer, rank: int, layout: str, names: tuple[str, ...] = ("gate", "up", "down")
) -> list[ops.ExpertLoraFactors]:
    factors = layer.factors(rank, layout, names)
    return [
        ops.ExpertLoraFactors(**{name: factor + 0.1 * v for name, factor in factors.items()}, scale=0.5)
        for v in range(3)
    ]


@pytest.mark.parametrize("packing", ["bf16", "int4"])
@pytest.mark.parametrize("runs", CUTS)
@pytest.mark.parametrize(("n", "k", "rank"), [(72, 50, 4), (131, 200, 33), (33, 31, 1)])
def test_linear(ctx: cpu.Context, runs: Runs, n: int, k: int, rank: int, packing: str) -> None:
    weight = cpu.pack(bf16(n, k, scale=k**-0.5), packing=packing_of(packing))
    x, bias, versions = bf16(11, k, seed=4), bf16(n, seed=5), linear_versions(n, k, rank)
    mixed = ops.Runs(tuple(versions[v] if v >= 0 else None for v, _ in runs), ends(runs))
    out = ops.linear(x, weight, bias, mixed)
    first = 0
    for version, rows in runs:
        alone = ops.linear(x, weight, bias, versions[version] if version >= 0 else None)
        assert torch.equal(out[first : first + rows], alone[first : first + rows])
        first += rows
    logits = ops.head_logits(x, weight, bias, lora=mixed)
    assert torch.equal(logits, out)


@pytest.mark.parametrize("rows", [300, 700])
def test_linear_whose_rows_are_cut_in_blocks(ctx: cpu.Context, rows: int) -> None:
    n, k = 64, 2048
    weight, versions = cpu.pack(bf16(n, k, scale=k**-0.5)), linear_versions(n, k, 8)
    x = bf16(rows, k, seed=4)
    runs = [(0, rows // 3), (1, 1), (2, rows - rows // 3 - 1)]
    out = ops.linear(x, weight, None, ops.Runs(tuple(versions), ends(runs)))
    parts = [
        ops.linear(part, weight, None, v)
        for part, v in zip(x.split([r for _, r in runs]), versions, strict=False)
    ]
    assert torch.equal(out, torch.cat(parts))


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("up",), ("down",), ("gate", "up")])
@pytest.mark.parametrize("layout", ["shared", "per_expert"])
@pytest.mark.parametrize("runs", CUTS)
def test_experts(ctx: cpu.Context, runs: Runs, layout: str, names: tuple[str, ...]) -> None:
    layer = Layer(5, 72, 50, biases=True)
    tokens = Tokens.random(layer, 11, 3)
    versions = expert_versions(layer, 4, layout, names)
    mixed = ops.Runs(tuple(versions[v] if v >= 0 else None for v, _ in runs), ends(runs))
    out = ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, mixed)
    first = 0
    for version, rows in runs:
        own = slice(first, first + rows)
        lora = versions[version] if version >= 0 else None
        alone = ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora)
        assert torch.equal(out[own], alone[own])
        if rows and version > 0:
            other = ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, versions[0])
            assert not torch.equal(out[own], other[own]), "the versions are to differ"
        first += rows


@pytest.mark.parametrize("layout", ["shared", "per_expert"])
def test_experts_whose_tokens_are_cut_in_chunks(layout: str) -> None:
    layer = Layer(2, 4096, 32)  # 32 slots of such rows leave 256 tokens in a chunk
    tokens = Tokens.random(layer, 300, 2)
    tokens.ids, tokens.weights = tokens.ids.repeat(1, 16), tokens.weights.repeat(1, 16) / 32
    versions = expert_versions(layer, 3, layout)
    mixed = ops.Runs((*versions, None), (100, 270, 280, 300))
    out = ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, mixed)
    for lora, first, end in zip(mixed.parts, (0, *mixed.ends), mixed.ends, strict=False):
        alone = ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora)
        assert torch.equal(out[first:end], alone[first:end])


def test_frozen_copies_keep_the_bits_when_the_masters_change() -> None:
    lora = linear_versions(40, 30, 4)[0]
    weight, x = cpu.pack(bf16(40, 30)), bf16(3, 30, seed=8)
    layer = Layer(2, 40, 33)
    tokens = Tokens.random(layer, 5, 2)
    experts = ops.ExpertLoraFactors(**layer.factors(3, "shared"))

    def both(a: ops.LoraFactors, b: ops.ExpertLoraFactors) -> list[torch.Tensor]:
        linear = ops.linear(x, weight, None, a)
        return [linear, ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, b)]

    lora.a += 0.001  # not a bf16 number any more
    assert experts.gate_a is not None
    experts.gate_a += 0.001
    before, kept = both(lora, experts), (lora.frozen(), experts.frozen(layer.store.packed))
    assert kept[0].packed().a is lora.packed().a, "the packed copy is shared, not made again"
    lora.a += 1
    experts.gate_a += 1
    assert all(torch.equal(*pair) for pair in zip(both(*kept), before, strict=False))
    assert not any(torch.equal(*pair) for pair in zip(both(lora, experts), before, strict=False))
    copies = {name: getattr(kept[1], name) for name in ops.FACTORS}
    again = ops.LoraFactors(kept[0].a, kept[0].b, kept[0].scale), ops.ExpertLoraFactors(**copies)
    assert all(torch.equal(*pair) for pair in zip(both(*again), before, strict=False)), "packed anew"


def test_what_does_not_fit_is_refused() -> None:
    weight, x = cpu.pack(bf16(40, 30)), bf16(3, 30)
    one, two, _ = linear_versions(40, 30, 4)
    for bad in ((1, 2), (2, 1, 3), (3,), (4, 3)):
        with pytest.raises(ShapeError, match="one end for each"):
            ops.linear(x, weight, None, ops.Runs((one, two), bad))
    other = ops.LoraFactors(one.a, one.b, 0.7)
    with pytest.raises(ShapeError, match="versions of one adapter"):
        ops.linear(x, weight, None, ops.Runs((one, other), (1, 3)))
    with pytest.raises(ShapeError, match="no gradient"):
        ops.linear(x.requires_grad_(), weight, None, ops.Runs((one, two), (1, 3)))
