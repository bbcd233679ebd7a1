"""Quantised experts against bf16 experts that hold the dequantised weights, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetero.experts import ExpertStore
from hetero.formats import FORMATS, packing
from hetero.kernels import cpu, ops

QUANTISED = [name for name, row in FORMATS.items() if row.group_size and not row.imported]
OUTPUT_ERROR = {
    "int8": 0.011,
    "int8_asym": 0.010,
    "int4": 0.17,
    "int4_asym": 0.15,
    "fp8": 0.055,
    "mxfp4": 0.22,
    "nf4": 0.18,
}
"""Largest relative error of a layer's output against bf16 weights."""


def tensors(e: int, h: int, i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(e, 2 * i, h, generator=generator).mul(h**-0.5).bfloat16()
    return gate_up, torch.randn(e, h, i, generator=generator).mul(i**-0.5).bfloat16()


def inputs(tokens: int, h: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, h, generator=generator).bfloat16()
    ids = torch.rand(tokens, e, generator=generator).topk(2).indices
    return x, ids, torch.rand(tokens, 2, generator=generator)


def factors(e: int, h: int, i: int, r: int) -> ops.ExpertLoraFactors:
    generator = torch.Generator().manual_seed(2)
    shapes = [(r, h), (e, i, r), (r, h), (e, i, r), (e, r, i), (h, r)]
    return ops.ExpertLoraFactors(
        *(torch.randn(*s, generator=generator).mul(0.05).requires_grad_() for s in shapes), scale=2.0
    )


@pytest.mark.parametrize("isa", cpu.isas(emulated=True))
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("h", "i"), [(96, 64), (50, 37)])
def test_forward_and_every_gradient_are_those_of_bf16_experts(isa: str, format: str, h: int, i: int) -> None:
    e, tokens = 3, 23
    gate_up, down = tensors(e, h, i)
    biases = {"gate_up_bias": torch.randn(e, 2 * i), "down_bias": torch.randn(e, h)}
    oss = {"activation": "swiglu_oss", "limit": 7.0, "alpha": 1.702}
    with cpu.using(cpu.Context(2, isa)):
        store = ExpertStore.from_tensors(gate_up, down, format=format, **biases, **oss)
        plain = ExpertStore.from_tensors(*store.dequantize(), **biases, **oss)
        results = []
        for each in (store, plain):
            x, ids, weights = inputs(tokens, h, e)
            lora = factors(e, h, i, 5)
            wanted = [x.requires_grad_(), weights.requires_grad_(), *lora.tensors()]
            out = ops.experts(each, x, ids, weights, lora=lora, keep=False)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), wanted)])
        for got, want in zip(*results, strict=True):
            assert got.isfinite().all()
            if isa in ("avx2", "avx512", "avx512vnni"):  # sums of codes, unrounded weights
                assert (got - want).norm() <= 0.01 * want.norm()
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize("format", QUANTISED)
def test_error_of_a_layer_is_that_of_its_format(format: str) -> None:
    gate_up, down = tensors(4, 512, 256)
    x, ids, weights = inputs(64, 512, 4)
    want = ExpertStore.from_tensors(gate_up, down).forward(x, ids, weights).double()
    got = ExpertStore.from_tensors(gate_up, down, format=format).forward(x, ids, weights).double()
    assert 0 < (got - want).norm() / want.norm() < OUTPUT_ERROR[format]


@pytest.mark.parametrize("format", QUANTISED)
def test_bytes_are_the_formats_arithmetic(format: str) -> None:
    gate_up, down = tensors(2, 512, 256)
    store = ExpertStore.from_tensors(gate_up, down, format=format)
    how = packing(format)
    assert store.nbytes == pytest.approx(2 * (how.nbytes(512, 512) + how.nbytes(512, 256)), rel=0.03)


def test_options_reach_the_packing() -> None:
    gate_up, down = tensors(2, 256, 128)
    errors = {}
    for name, options in {
        "plain": {},
        "coarse": {"group_size": 128},
        "asymmetric": {"symmetric": False},
        "searched": {"scale_search": "mse"},
    }.items():
        store = ExpertStore.from_tensors(gate_up, down, "int4", **options)  # type: ignore[arg-type]
        errors[name] = float((store.dequantize()[0] - gate_up).double().norm())
    assert errors["coarse"] > errors["plain"] > errors["searched"] > errors["asymmetric"]
