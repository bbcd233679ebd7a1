"""LoRA on experts: every rank, layout and subset of projections, and its packed copies."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Layer, Tokens, check, expected, run

from hetero.errors import ShapeError
from hetero.kernels import cpu, ops


@pytest.mark.parametrize("layout", ["shared", "per_expert"])
@pytest.mark.parametrize("rank", [1, 5, 8, 24, 64])
def test_any_rank(ctx: cpu.Context, rank: int, layout: str) -> None:
    layer = Layer(3, 72, 50)
    tokens = Tokens.random(layer, 9, 2)
    factors = layer.factors(rank, layout)
    check(run(layer, tokens, factors), expected(layer, tokens, factors))


@pytest.mark.parametrize("layout", ["shared", "per_expert"])
@pytest.mark.parametrize("names", [("down",), ("gate",), ("up",), ("gate", "up"), ("gate", "down")])
def test_any_subset_of_projections(ctx: cpu.Context, names: tuple[str, ...], layout: str) -> None:
    layer = Layer(3, 64, 48, "swiglu_oss", biases=True, limit=7.0)
    tokens = Tokens.random(layer, 9, 2)
    factors = layer.factors(4, layout, names)
    check(run(layer, tokens, factors), expected(layer, tokens, factors))


def test_mixed_layouts(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 48)
    tokens = Tokens.random(layer, 9, 2)
    factors = layer.factors(4, "shared", ("gate", "up")) | layer.factors(6, "per_expert", ("down",))
    check(run(layer, tokens, factors), expected(layer, tokens, factors))


def test_some_experts_without_lora(ctx: cpu.Context) -> None:
    layer = Layer(4, 64, 48)
    tokens = Tokens.random(layer, 9, 2)
    factors = layer.factors(4, "shared")
    for name in ("gate_b", "up_b", "down_a"):
        factors[name][1::2] = 0.0
    check(run(layer, tokens, factors), expected(layer, tokens, factors))


def test_zero_factors_give_the_bits_of_the_base(ctx: cpu.Context) -> None:
    layer = Layer(4, 64, 48)
    tokens = Tokens.random(layer, 9, 2)
    for layout in ("shared", "per_expert"):
        factors = layer.factors(8, layout)
        for name in ("gate_b", "up_b", "down_b"):
            factors[name].zero_()
        with_lora, without = run(layer, tokens, factors), run(layer, tokens)
        assert torch.equal(with_lora.out, without.out)
        assert torch.equal(with_lora.dx, without.dx)


def test_only_wanted_gradients_are_computed(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 48)
    tokens = Tokens.random(layer, 9, 2)
    factors = layer.factors(4, "shared")
    want = run(layer, tokens, factors)
    factors["up_b"].requires_grad_()
    lora = ops.ExpertLoraFactors(**factors, scale=0.5)
    ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora).backward(tokens.dout)
    assert torch.equal(factors["up_b"].grad, want.dfactors["up_b"])
    assert all(factors[name].grad is None for name in factors if name != "up_b")


def test_an_update_in_place_is_seen_and_undone(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 48)
    tokens = Tokens.random(layer, 9, 2)
    factors = layer.factors(4, "shared")
    lora = ops.ExpertLoraFactors(**factors, scale=0.5)

    def call() -> torch.Tensor:
        return ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora)

    before, kept = call(), factors["down_b"].clone()
    assert lora.packed(layer.store.packed) is lora.packed(layer.store.packed)
    factors["down_b"].mul_(2.0)
    assert not torch.equal(call(), before)
    factors["down_b"].copy_(kept)
    assert torch.equal(call(), before)


def test_backward_uses_the_factors_of_its_forward(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 48)
    tokens = Tokens.random(layer, 9, 2)
    want = run(layer, tokens, layer.factors(4, "shared"))
    factors = {name: f.requires_grad_() for name, f in layer.factors(4, "shared").items()}
    lora = ops.ExpertLoraFactors(**factors, scale=0.5)
    out = ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora)
    with torch.no_grad():
        factors["gate_a"].zero_()
    out.backward(tokens.dout)
    for name, grad in want.dfactors.items():
        assert torch.equal(factors[name].grad, grad), name


def test_factors_that_do_not_fit_are_errors() -> None:
    layer = Layer(3, 64, 48)
    packed = layer.store.packed
    good = layer.factors(4, "shared")
    for name, bad, message in [
        ("gate_b", None, "gate_a and gate_b must both be given"),
        ("up_a", torch.zeros(5, 64), "up_a"),
        ("down_a", torch.zeros(3, 4, 47), r"down_a is \[3, 4, 47\]"),
        ("gate_a", torch.zeros(3, 4, 64), "one layout"),
    ]:
        with pytest.raises(ShapeError, match=message):
            ops.ExpertLoraFactors(**(good | {name: bad})).packed(packed)
    assert ops.ExpertLoraFactors().packed(packed) is None
