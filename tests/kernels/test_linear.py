"""The linear op against fp64, its gradients, and the bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from expert_cases import bf16, relative

from hetero.errors import ShapeError
from hetero.kernels import cpu, ops, reference

SHAPES = [(1, 1), (31, 33), (33, 31), (64, 64), (131, 200), (250, 288), (40, 1407), (2880, 50)]  # N, K


def factors(n: int, k: int, rank: int) -> ops.LoraFactors:
    a, b = bf16(rank, k, scale=k**-0.5, seed=1), bf16(n, rank, seed=2)
    return ops.LoraFactors(a.requires_grad_(), b.requires_grad_(), 0.3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_forward_and_backward(ctx: cpu.Context, n: int, k: int, bias: bool) -> None:
    weight, b = bf16(n, k, scale=k**-0.5), bf16(n, seed=3) if bias else None
    x, dy = bf16(7, k, seed=4).requires_grad_(), bf16(7, n, seed=5)
    y = ops.linear(x, cpu.pack(weight), b)
    y.backward(dy)
    want = reference.linear(x.detach().double(), weight.double(), None if b is None else b.double())
    assert relative(y.detach(), want) < 1e-6
    assert x.grad is not None
    assert relative(x.grad, dy.double() @ weight.double()) < 1e-6


@pytest.mark.parametrize("rank", [1, 5, 8, 24, 64])
def test_lora(ctx: cpu.Context, rank: int) -> None:
    n, k = 72, 50
    weight, lora = bf16(n, k, scale=k**-0.5), factors(n, k, rank)
    x, dy = bf16(9, k, seed=4).requires_grad_(), bf16(9, n, seed=5)
    y = ops.linear(x, cpu.pack(weight), None, lora)
    y.backward(dy)
    wide = [t.detach().double().requires_grad_() for t in (x, lora.a, lora.b)]
    want = reference.linear(wide[0], weight.double(), None, (wide[1], wide[2], 0.3))
    want.backward(dy.double())
    assert relative(y.detach(), want.detach()) < 0.005
    for got, true in zip((x, lora.a, lora.b), wide, strict=True):
        assert got.grad is not None
        assert true.grad is not None
        assert got.grad.dtype == torch.float32
        assert relative(got.grad, true.grad) < 0.01


def test_leading_axes_and_dtypes(ctx: cpu.Context) -> None:
    weight = cpu.pack(bf16(40, 50))
    x = bf16(2, 3, 50)
    y = ops.linear(x, weight)
    assert y.shape == (2, 3, 40)
    assert y.dtype == torch.float32
    half = ops.linear(x.bfloat16(), weight)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, y.bfloat16())
    assert torch.equal(ops.linear(x.bfloat16(), weight, out_dtype=torch.float32), y)
    assert ops.linear(x[:0], weight).shape == (0, 3, 40)
    assert torch.equal(ops.linear(x.transpose(0, 1), weight), y.transpose(0, 1))
    leaf = x.bfloat16().requires_grad_()
    ops.linear(leaf, weight, out_dtype=torch.float32).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    assert leaf.grad.shape == x.shape


def test_every_row_has_the_same_bits_in_any_batch(ctx: cpu.Context) -> None:
    n, k = 70, 90
    weight, lora, x = cpu.pack(bf16(n, k)), factors(n, k, 5), bf16(200, k)
    dy = bf16(200, n, seed=6)

    def both(rows: torch.Tensor, douts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = rows.clone().requires_grad_()
        y = ops.linear(leaf, weight, None, lora)
        (dx,) = torch.autograd.grad(y, leaf, douts)
        return y.detach(), dx

    y, dx = both(x, dy)
    for m in (*range(1, 41), 199):
        first = (200 - m) // 3
        part_y, part_dx = both(x[first : first + m], dy[first : first + m])
        assert torch.equal(part_y, y[first : first + m]), m
        assert torch.equal(part_dx, dx[first : first + m]), m


def test_threads_do_not_matter(ctx: cpu.Context) -> None:
    n, k = 200, 131
    weight, x, dy = cpu.pack(bf16(n, k)), bf16(700, k), bf16(700, n, seed=6)
    results = []
    for threads in (1, 2, 3):
        with cpu.using(cpu.Context(threads, ctx.isa)):
            lora = factors(n, k, 5)
            leaf = x.clone().requires_grad_()
            y = ops.linear(leaf, weight, None, lora)
            y.backward(dy)
            results.append((y.detach(), leaf.grad, lora.a.grad, lora.b.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_fp32_instruction_sets_agree_bit_for_bit() -> None:
    weight, x = cpu.pack(bf16(100, 333)), bf16(29, 333)
    results = {}
    for isa in {"scalar", "avx2", "avx512", "avx512vnni"} & set(cpu.isas()):
        with cpu.using(cpu.Context(2, isa)):
            results[isa] = ops.linear(x, weight)
    assert all(torch.equal(y, results["scalar"]) for y in results.values())


def test_an_update_in_place_is_seen(ctx: cpu.Context) -> None:
    weight, lora, x = cpu.pack(bf16(40, 50)), factors(40, 50, 4), bf16(3, 50)
    before = ops.linear(x, weight, None, lora)
    assert lora.packed().a is lora.packed().a
    with torch.no_grad():
        lora.b.zero_()
    assert torch.equal(ops.linear(x, weight, None, lora), ops.linear(x, weight))
    assert not torch.equal(before, ops.linear(x, weight))


def test_what_does_not_fit_is_an_error() -> None:
    weight, x = cpu.pack(bf16(40, 50)), bf16(3, 50)
    with pytest.raises(ShapeError, match=r"x is \[3, 49\].*expected \[any, 50\]"):
        ops.linear(x[:, :49], weight)
    with pytest.raises(ShapeError, match="bias"):
        ops.linear(x, weight, torch.zeros(39))
    with pytest.raises(ShapeError, match=r"expected a \[r, 50\] and b \[40, r\]"):
        ops.linear(x, weight, None, ops.LoraFactors(torch.zeros(4, 50), torch.zeros(40, 5), 1.0))
    with pytest.raises(ShapeError, match="float64"):
        ops.linear(x.double(), weight)
    with pytest.raises(ShapeError, match="float16"):
        ops.linear(x, weight, out_dtype=torch.float16)
    with pytest.raises(ShapeError, match="stack"):
        ops.linear(x, cpu.pack(bf16(2, 40, 50)))
