"""Experts for tensors on a GPU: the CPU computes, the values and gradients come back."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Layer, Tokens, run

from hetero.kernels import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("masters", ["cpu", "cuda"])
def test_same_bits_as_on_the_cpu(masters: str) -> None:
    layer = Layer(4, 72, 50, biases=True)
    tokens = Tokens.random(layer, 33, 2)
    factors = layer.factors(5, "shared")
    want = run(layer, tokens, factors)
    x, weights = tokens.x.cuda().requires_grad_(), tokens.weights.cuda().requires_grad_()
    own = {name: factor.to(masters).requires_grad_() for name, factor in factors.items()}
    lora = ops.ExpertLoraFactors(**own, scale=0.5)
    out = ops.experts(layer.store, x, tokens.ids.cuda(), weights, lora)
    out.backward(tokens.dout.cuda())
    assert out.is_cuda
    assert x.grad is not None
    assert weights.grad is not None
    assert torch.equal(out.cpu(), want.out)
    assert torch.equal(x.grad.cpu(), want.dx)
    assert torch.equal(weights.grad.cpu(), want.dweights)
    for name, factor in own.items():
        assert factor.grad is not None
        assert factor.grad.device.type == masters
        assert torch.equal(factor.grad.cpu(), want.dfactors[name])


def test_it_waits_for_the_kernels_before_it_and_others_for_it() -> None:
    layer = Layer(4, 64, 48)
    tokens = Tokens.random(layer, 64, 2)
    want = layer.store.forward(tokens.x, tokens.ids, tokens.weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-3
        x = tokens.x.cuda() + 0.0 * busy[:64, :64].nan_to_num(0.0, 0.0, 0.0)
        out = layer.store.forward(x, tokens.ids.cuda(), tokens.weights.cuda()) * 2.0
    stream.synchronize()
    assert torch.equal(out.cpu(), want * 2.0)
