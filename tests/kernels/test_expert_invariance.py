"""The same bits whatever the batch, the threads, the order of backward; memory that comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from expert_cases import Layer, Result, Tokens, run
from torch import Tensor

from hetero.experts import ExpertStore
from hetero.kernels import cpu, ops


def same(a: Result, b: Result) -> bool:
    pairs = [(a.out, b.out), (a.dx, b.dx), (a.dweights, b.dweights)]
    pairs += [(a.dfactors[name], b.dfactors[name]) for name in a.dfactors]
    return all(torch.equal(x, y) for x, y in pairs)


def rows(tokens: Tokens, pick: Tensor) -> Tokens:
    return Tokens(tokens.x[pick], tokens.ids[pick], tokens.weights[pick], tokens.dout[pick])


@pytest.mark.parametrize("layout", [None, "shared", "per_expert"])
def test_a_token_has_the_same_bits_in_any_batch(ctx: cpu.Context, layout: str | None) -> None:
    layer = Layer(4, 72, 50, biases=True)
    tokens = Tokens.random(layer, 200, 2)
    factors = layer.factors(5, layout) if layout else None
    whole = run(layer, tokens, factors)
    for size in (*range(1, 41, 3), 40):
        pick = torch.randperm(200, generator=torch.Generator().manual_seed(size))[:size]
        part = run(layer, rows(tokens, pick), factors)
        assert torch.equal(part.out, whole.out[pick]), size
        assert torch.equal(part.dx, whole.dx[pick]), size
        assert torch.equal(part.dweights, whole.dweights[pick]), size


def test_every_batch_size_of_the_forward(ctx: cpu.Context) -> None:
    layer = Layer(3, 64, 33)
    tokens = Tokens.random(layer, 41, 2)
    whole = layer.store.forward(tokens.x, tokens.ids, tokens.weights)
    for size in range(1, 41):
        part = rows(tokens, torch.arange(size))
        assert torch.equal(layer.store.forward(part.x, part.ids, part.weights), whole[:size]), size


def test_the_order_of_the_experts_of_a_token_does_not_matter(ctx: cpu.Context) -> None:
    layer = Layer(6, 64, 48)
    tokens = Tokens.random(layer, 9, 4)
    turned = Tokens(tokens.x, tokens.ids.flip(1), tokens.weights.flip(1), tokens.dout)
    a, b = run(layer, tokens), run(layer, turned)
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.dx, b.dx)
    assert torch.equal(a.dweights, b.dweights.flip(1))


@pytest.mark.parametrize("t", [1, 40, 150])
def test_threads_do_not_matter(ctx: cpu.Context, t: int) -> None:
    layer = Layer(4, 72, 50)
    tokens, factors = Tokens.random(layer, t, 2), layer.factors(5, "shared")
    results = []
    for threads in (1, 2, 3):
        with cpu.using(cpu.Context(threads, ctx.isa)):
            results.append(run(layer, tokens, factors))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("layout", [None, "shared", "per_expert"])
def test_recomputing_gives_the_bits_of_keeping(ctx: cpu.Context, layout: str | None) -> None:
    layer = Layer(4, 72, 50, "swiglu_oss", biases=True, limit=7.0)
    tokens = Tokens.random(layer, 21, 2)
    factors = layer.factors(5, layout) if layout else None
    assert same(run(layer, tokens, factors, keep=True), run(layer, tokens, factors, keep=False))


ORDERS: dict[str, Callable[[int], list[int]]] = {
    "fifo": lambda n: list(range(n)),
    "lifo": lambda n: list(range(n))[::-1],
    "twice": lambda n: [0, 1, 0, *range(2, n), 1],
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_live_forwards_in_any_order_of_backward(ctx: cpu.Context, order: str, keep: bool) -> None:
    layer = Layer(3, 64, 48)
    batches = [Tokens.random(layer, t, 2, seed=t) for t in (5, 17, 3)]
    want = [run(layer, tokens).dx for tokens in batches]
    inputs = [tokens.x.clone().requires_grad_() for tokens in batches]
    outs = [
        ops.experts(layer.store, x, tokens.ids, tokens.weights, keep=keep)
        for x, tokens in zip(inputs, batches, strict=True)
    ]
    for i in ORDERS[order](len(batches)):
        (dx,) = torch.autograd.grad(outs[i], inputs[i], batches[i].dout, retain_graph=True)
        assert torch.equal(dx, want[i])


@pytest.mark.parametrize("keep", [True, False])
def test_layers_of_different_sizes_live_beside_each_other(ctx: cpu.Context, keep: bool) -> None:
    layers = [Layer(3, 64, 48), Layer(5, 200, 33, seed=5), Layer(2, 40, 130, seed=9)]
    tokens = [Tokens.random(layer, t, 2, seed=t) for layer, t in zip(layers, (5, 40, 9), strict=True)]
    want = [run(layer, own) for layer, own in zip(layers, tokens, strict=True)]
    inputs = [own.x.clone().requires_grad_() for own in tokens]
    outs = [
        ops.experts(layer.store, x, own.ids, own.weights, keep=keep)
        for layer, x, own in zip(layers, inputs, tokens, strict=True)
    ]
    for i in (1, 0, 2):
        assert torch.equal(outs[i].detach(), want[i].out)
        (dx,) = torch.autograd.grad(outs[i], inputs[i], tokens[i].dout)
        assert torch.equal(dx, want[i].dx)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_stores_and_handles_give_their_memory_back() -> None:
    gate_up, down = torch.randn(4, 512, 256), torch.randn(4, 256, 256)  # 1.5 MB packed
    x, ids = torch.randn(64, 256), torch.arange(128).view(64, 2) % 4

    def once() -> None:
        store = ExpertStore.from_tensors(gate_up, down)
        weights = torch.rand(64, 2, requires_grad=True)
        out = ops.experts(store, x, ids, weights)
        out.sum().backward()
        ops.experts(store, x, ids, weights)  # a handle that never sees a backward

    for _ in range(10):
        once()
    gc.collect()
    before = resident()
    for _ in range(100):
        once()
    gc.collect()
    assert resident() - before < 16 << 20
