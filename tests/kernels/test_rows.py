from __future__ import annotations

import math

import pytest
import torch

from hetero.errors import ShapeError
from hetero.kernels import cpu, ops, reference

WIDTHS = [1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 576, 1000]
EXTREMES = torch.tensor(
    [-3e38, -1e30, -500.0, -104.0, -88.4, -50.0, -1e-30, 0.0, 1e-30, 50.0, 88.8, 500.0, 1e30, 3e38]
)


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def exp(x: torch.Tensor) -> torch.Tensor:
    """The kernels' exp, seen through a softmax of the pair (0, x) with x <= 0: y1 / y0."""
    y = ops.softmax(torch.stack([torch.zeros_like(x), x], -1))
    return y[..., 1] / y[..., 0]


@pytest.mark.parametrize("low", [-1.0, -20.0, -80.0])
def test_exp_is_accurate(ctx: cpu.Context, low: float) -> None:
    x = torch.linspace(low, 0.0, 200_001)
    true = x.double().exp()
    assert ((exp(x).double() - true).abs() / true).max() < 4e-7  # exp itself 1e-7, then two divisions


def test_exp_underflows_to_zero_and_keeps_nan(ctx: cpu.Context) -> None:
    assert (exp(torch.tensor([-87.5, -105.0, -500.0, -3e38, -math.inf])) == 0.0).all()
    assert (exp(torch.linspace(-87.0, -80.0, 1000)) > 0.0).all()
    assert torch.isnan(exp(torch.tensor([math.nan]))).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, None), (1.0, None), (0.0, False)])
def test_rms_norm(
    ctx: cpu.Context,
    width: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    offset: float,
    round_first: bool | None,
) -> None:
    x, weight = rand(3, 2, width, dtype=x_dtype), rand(width, seed=1, dtype=w_dtype)
    got = ops.rms_norm(x, weight, 1e-5, offset, round_first=round_first)
    want = reference.rms_norm(x.double(), weight.double(), 1e-5, offset)
    assert got.dtype == x_dtype
    torch.testing.assert_close(
        got.double(), want, rtol=2e-2 if x_dtype == torch.bfloat16 else 2e-6, atol=1e-6
    )
    # The order of rounding is Transformers'; only an fp32 tie may fall to the other side.
    same = got == reference.rms_norm(x, weight, 1e-5, offset, round_first=round_first)
    assert x_dtype == torch.float32 or same.float().mean() > 0.99


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_gradient(ctx: cpu.Context, width: int, offset: float) -> None:
    x, weight, dy = rand(5, width), rand(width, seed=1), rand(5, width, seed=2)
    x.requires_grad_()
    (got,) = torch.autograd.grad(ops.rms_norm(x, weight, 1e-5, offset), x, dy)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference.rms_norm(wide, weight.double(), 1e-5, offset), wide, dy.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-6)


def test_rms_norm_checks_its_arguments() -> None:
    with pytest.raises(ShapeError, match=r"expected \[\.\.\., H\] and \[H\]"):
        ops.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5)
    with pytest.raises(ShapeError, match="expected bfloat16 or float32"):
        ops.rms_norm(torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8), 1e-5)


@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
def test_activation(ctx: cpu.Context, kind: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.linspace(-0.01, 0.01, 101)]).requires_grad_()
    wide = x.detach().double().requires_grad_()
    got, want = ops.activation(x, kind), reference.activation(wide, kind)
    torch.testing.assert_close(
        got.double(), want, rtol=3e-5 if "gelu" in kind else 2e-6, atol=1e-7 if "gelu" in kind else 1e-30
    )
    dy = rand(x.numel(), seed=3)
    (dx,) = torch.autograd.grad(got, x, dy)
    (dx_want,) = torch.autograd.grad(want, wide, dy.double())
    torch.testing.assert_close(dx.double(), dx_want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", reference.GATED_ACTIVATIONS)
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("n", [1, 5, 16, 37, 20_000])
def test_gated_activation(ctx: cpu.Context, kind: str, limit: float | None, n: int) -> None:
    gate, up, dy = (rand(n, scale=3.0, seed=s) for s in range(3))
    narrow = [gate.requires_grad_(), up.requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    got = ops.gated_activation(*narrow, kind, limit=limit)
    want = reference.gated_activation(*wide, kind, limit=limit)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)
    grads = torch.autograd.grad(got, narrow, dy)
    for grad, grad_want in zip(grads, torch.autograd.grad(want, wide, dy.double()), strict=True):
        torch.testing.assert_close(grad.double(), grad_want, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kind", reference.GATED_ACTIVATIONS)
def test_activations_are_finite_for_every_finite_input(ctx: cpu.Context, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gate = EXTREMES.to(dtype).requires_grad_()
        up = torch.ones_like(gate).requires_grad_()
        grads = torch.autograd.grad(ops.gated_activation(gate, up, kind).sum(), [gate, up])
        assert all(torch.isfinite(g).all() for g in grads)
        if kind != "swiglu_oss":
            x = EXTREMES.to(dtype).requires_grad_()
            y = ops.activation(x, kind)
            (dx,) = torch.autograd.grad(y.sum(), x)
            assert torch.isfinite(y).all()
            assert torch.isfinite(dx).all()


def test_silu_vanishes_for_huge_negative_input(ctx: cpu.Context) -> None:
    assert (ops.activation(torch.tensor([-500.0, -1e30, -3e38]), "silu") == 0.0).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax(ctx: cpu.Context, width: int, dtype: torch.dtype) -> None:
    x = rand(3, width, scale=4.0, dtype=dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    got, want = ops.softmax(x), reference.softmax(wide)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=1e-30)
    dy = rand(3, width, seed=1)
    (dx,) = torch.autograd.grad(got, x, dy)
    (dx_want,) = torch.autograd.grad(want, wide, dy.double())
    torch.testing.assert_close(
        dx.double(), dx_want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6
    )


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_topk_gives_ties_to_the_lower_id(ctx: cpu.Context, k: int) -> None:
    x = torch.randint(0, 4, (50, 8), generator=torch.Generator().manual_seed(k)).float().requires_grad_()
    values, ids = ops.topk(x, k)
    want_values, want_ids = reference.topk(x, k)
    assert torch.equal(ids, want_ids)
    assert torch.equal(values, want_values)
    (dx,) = torch.autograd.grad(values.sum(), x)
    assert torch.equal(dx, torch.zeros_like(dx).scatter(-1, ids, 1.0))


def test_topk_puts_nan_last_and_checks_k(ctx: cpu.Context) -> None:
    _, ids = ops.topk(torch.tensor([[math.nan, 1.0, 3.0, math.nan, 2.0]]), 5)
    assert ids.tolist() == [[2, 4, 1, 0, 3]]
    with pytest.raises(ShapeError, match="k = 3"):
        ops.topk(torch.zeros(1, 2), 3)


@pytest.mark.parametrize("width", [5, 33, 200])
def test_a_row_is_computed_alone(ctx: cpu.Context, width: int) -> None:
    """Bits of a row: alone, at another place of the batch, at another address, with more or fewer threads."""
    x, y = rand(70, width, scale=6.0, dtype=torch.bfloat16), rand(70, width, seed=1, dtype=torch.bfloat16)
    weight = rand(width, seed=2, dtype=torch.bfloat16)
    operations = [
        lambda a, b: ops.rms_norm(a, weight, 1e-6),
        lambda a, b: ops.softmax(a),
        *(lambda a, b, k=k: ops.gated_activation(a, b, k) for k in reference.GATED_ACTIVATIONS),
    ]
    for operation in operations:
        whole = operation(x, y)
        order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
        assert torch.equal(operation(x[order], y[order]), whole[order])
        for row in (0, 1, 35, 69):
            shifted = torch.cat([x[:1, :1].flatten(), x[row]])[1:]  # an odd address
            assert torch.equal(operation(shifted[None], y[row : row + 1])[0], whole[row])
        for threads in (1, 3):
            with cpu.using(cpu.Context(threads, ctx.isa)):
                assert torch.equal(operation(x, y), whole)


@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
def test_an_element_does_not_depend_on_its_lane(ctx: cpu.Context, kind: str) -> None:
    x = torch.linspace(-12, 12, 97)
    whole = ops.activation(x, kind)
    alone = torch.cat([ops.activation(x[i : i + 1], kind) for i in range(97)])
    assert torch.equal(whole, alone)


def test_empty_inputs(ctx: cpu.Context) -> None:
    assert ops.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert ops.softmax(torch.zeros(0, 8)).shape == (0, 8)
    assert ops.activation(torch.zeros(0), "silu").shape == (0,)
    assert ops.topk(torch.zeros(0, 8), 2)[1].shape == (0, 2)
