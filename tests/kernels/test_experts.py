"""Experts forward and backward against autograd of the fp64 reference, in awkward shapes."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Layer, Tokens, bf16, check, expected, relative, run

from hetero.errors import ShapeError
from hetero.experts import ExpertStore
from hetero.kernels import cpu, ops


@pytest.mark.parametrize(
    ("h", "i"), [(64, 64), (200, 131), (250, 160), (288, 200), (33, 31), (1, 1), (2880, 40), (40, 1407)]
)
def test_any_size(ctx: cpu.Context, h: int, i: int) -> None:
    layer = Layer(3, h, i)
    tokens = Tokens.random(layer, 5, 2)
    check(run(layer, tokens), expected(layer, tokens))


@pytest.mark.parametrize(
    ("activation", "biases", "limit", "alpha"),
    [
        ("silu", True, None, None),
        ("gelu", False, None, None),
        ("gelu_tanh", True, None, None),
        ("relu", False, None, None),
        ("silu", False, 2.5, None),
        ("swiglu_oss", True, 2.5, 1.702),
        ("swiglu_oss", True, 7.0, 1.0),
    ],
)
def test_any_activation(
    ctx: cpu.Context, activation: str, biases: bool, limit: float | None, alpha: float | None
) -> None:
    layer = Layer(3, 72, 50, activation, biases, limit, alpha)
    tokens = Tokens.random(layer, 9, 2)
    # Pre-activations are kept in bf16: one within its rounding of the limit may fall on either side.
    check(run(layer, tokens), expected(layer, tokens), 0.01 if limit is None else 0.03)


@pytest.mark.parametrize("t", [1, 2, 17, 40])
@pytest.mark.parametrize(("e", "k"), [(1, 1), (4, 1), (4, 4), (9, 3)])
def test_any_number_of_tokens_and_experts(ctx: cpu.Context, t: int, e: int, k: int) -> None:
    layer = Layer(e, 48, 40)
    tokens = Tokens.random(layer, t, k)
    check(run(layer, tokens), expected(layer, tokens))


ROUTES = {
    "all to one expert": lambda ids: torch.full_like(ids, 2),
    "duplicates in a token": lambda ids: ids[:, :1].expand(-1, 3).contiguous(),
    "some skipped": lambda ids: torch.where(torch.arange(3) == ids % 3, -1, ids),
    "a token without experts": lambda ids: torch.where(torch.arange(len(ids))[:, None] == 4, -1, ids),
    "nobody anywhere": lambda ids: torch.full_like(ids, -1),
    "int32": lambda ids: ids.int(),
}


@pytest.mark.parametrize("route", ROUTES)
def test_any_routing(ctx: cpu.Context, route: str) -> None:
    layer = Layer(5, 64, 48, biases=True)
    tokens = Tokens.random(layer, 12, 3)
    tokens.ids = ROUTES[route](tokens.ids)
    factors = layer.factors(4, "shared")
    check(run(layer, tokens, factors), expected(layer, tokens, factors))


def test_no_tokens(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 48)
    tokens = Tokens.random(layer, 1, 2)
    empty = Tokens(tokens.x[:0], tokens.ids[:0], tokens.weights[:0], tokens.dout[:0])
    got = run(layer, empty, layer.factors(4, "shared"))
    assert got.out.shape == (0, 64)
    assert got.dx.shape == (0, 64)
    assert got.dweights.shape == (0, 2)
    assert all((grad == 0).all() for grad in got.dfactors.values())


def test_dtypes_of_the_caller_come_back(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 48)
    tokens = Tokens.random(layer, 6, 2)
    for x_dtype, w_dtype in [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]:
        x = tokens.x.detach().to(x_dtype).requires_grad_()
        weights = tokens.weights.detach().to(w_dtype).requires_grad_()
        out = ops.experts(layer.store, x, tokens.ids, weights)
        out.sum().backward()
        assert out.dtype == x_dtype
        assert x.grad is not None
        assert weights.grad is not None
        assert x.grad.dtype == x_dtype
        assert weights.grad.dtype == w_dtype


def test_no_grad_computes_the_same_bits(ctx: cpu.Context) -> None:
    layer = Layer(4, 64, 96)
    tokens = Tokens.random(layer, 11, 2)
    assert torch.equal(layer.store.forward(tokens.x, tokens.ids, tokens.weights), run(layer, tokens).out)


@pytest.mark.parametrize("gate", [-500.0, -104.0, -89.0, -88.0, 0.0, 88.0, 500.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oss"])
def test_extreme_gates_stay_finite_and_right(ctx: cpu.Context, activation: str, gate: float) -> None:
    layer = Layer(2, 32, 32, activation)
    gate_up = layer.gate_up.clone()
    gate_up[:, :32] = 0.0
    gate_up[:, :32, 0] = gate  # times x[0] = 1
    layer.gate_up = gate_up
    layer.store = ExpertStore.from_tensors(gate_up, layer.down, activation=activation)
    tokens = Tokens.random(layer, 4, 2)
    tokens.x[:, 0] = 1.0
    got, want = run(layer, tokens), expected(layer, tokens)
    for name in ("out", "dx", "dweights"):
        value, true = getattr(got, name), getattr(want, name)
        assert value.isfinite().all()
        assert (value.double() - true).abs().max() <= 0.02 * true.abs().max() + 1e-30, name


@pytest.mark.parametrize("bad", [5, -2, 2**40])
def test_an_id_that_is_no_expert_is_an_error(ctx: cpu.Context, bad: int) -> None:
    layer = Layer(5, 64, 48)
    tokens = Tokens.random(layer, 6, 2)
    tokens.ids[3, 1] = bad
    out = torch.full((6, 64), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=rf"expert_ids\[3, 1\] is {bad}.*below 5"):
        cpu.experts_forward(layer.store.packed, tokens.x.bfloat16(), tokens.ids, tokens.weights, out=out)
    assert (out == 7.0).all()


def test_wrong_shapes_are_errors() -> None:
    layer = Layer(3, 64, 48)
    t = Tokens.random(layer, 6, 2)
    with pytest.raises(ShapeError, match=r"x is \[6, 63\].*expected \[any, 64\]"):
        ops.experts(layer.store, t.x[:, :63], t.ids, t.weights)
    with pytest.raises(ShapeError, match="expert_ids"):
        ops.experts(layer.store, t.x, t.ids[:5], t.weights)
    with pytest.raises(ShapeError, match="expert_weights"):
        ops.experts(layer.store, t.x, t.ids, t.weights[:, :1])
    with pytest.raises(ShapeError, match="expert_ids"):
        ops.experts(layer.store, t.x, t.ids.float(), t.weights)
    with pytest.raises(ShapeError, match="float64"):
        ops.experts(layer.store, t.x.double(), t.ids, t.weights)


def test_long_batches_run_in_pieces(ctx: cpu.Context) -> None:
    """300 tokens of 128 slots: scratch memory allows 256 tokens of that width at a time."""
    if ctx.isa.endswith("_emulated") or ctx.isa == "scalar":
        pytest.skip("takes a minute without vector instructions; the pieces do not depend on the ISA")
    layer = Layer(2, 1024, 32)
    few = Tokens.random(layer, 5, 2)
    few = Tokens(few.x, few.ids.repeat(1, 64), few.weights.repeat(1, 64) / 64, few.dout)
    many = Tokens(*(t.repeat(60, *[1] * (t.dim() - 1)) for t in (few.x, few.ids, few.weights, few.dout)))
    factors = layer.factors(3, "shared")
    got, once = run(layer, many, factors), run(layer, few, factors)
    assert torch.equal(got.out, once.out.repeat(60, 1))
    assert torch.equal(got.dx, once.dx.repeat(60, 1))
    assert torch.equal(got.dweights, once.dweights.repeat(60, 1))
    for name, grad in once.dfactors.items():
        assert relative(got.dfactors[name], grad * 60) < 1e-3, name


def test_gradients_accumulate_without_drift(ctx: cpu.Context) -> None:
    layer = Layer(2, 32, 32)
    tokens = Tokens.random(layer, 3, 2)
    factors = {name: f.requires_grad_() for name, f in layer.factors(4, "shared").items()}
    lora = ops.ExpertLoraFactors(**factors, scale=1.0)
    for _ in range(1024):
        ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora).backward(tokens.dout)
    total = {name: f.grad.clone() for name, f in factors.items() if f.grad is not None}
    for f in factors.values():
        f.grad = None
    ops.experts(layer.store, tokens.x, tokens.ids, tokens.weights, lora).backward(tokens.dout)
    for name, f in factors.items():
        assert f.grad is not None
        assert 0.999 < float(total[name].norm() / (1024 * f.grad.norm())) < 1.001, name


def test_bias_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="down_bias"):
        ExpertStore.from_tensors(bf16(2, 8, 4), bf16(2, 4, 4), down_bias=torch.zeros(2, 5))
