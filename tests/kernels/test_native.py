"""The kernels for AMX and AVX512-BF16 multiply as their twins in plain C++ do.

Skipped where the processor lacks the instructions; `make trapped` runs them on any that has AVX-512.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import bf16, relative

from hetero.experts import ExpertStore
from hetero.formats import FORMATS
from hetero.kernels import cpu, ops

FORMATS_HERE = [name for name, row in FORMATS.items() if not row.imported]
TOKENS = [1, 15, 16, 17, 33, 70]


@pytest.fixture(params=["avx512bf16", pytest.param("amx", marks=pytest.mark.amx)])
def native(request: pytest.FixtureRequest) -> str:
    if request.param not in cpu.isas():
        pytest.skip(f"this processor has no {request.param}; `make trapped` does without")
    return str(request.param)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 31), (131, 200), (70, 900)])
def test_products_have_the_same_bits(native: str, n: int, k: int) -> None:
    for tokens in TOKENS:
        results = []
        for isa in (native, f"{native}_emulated"):
            with cpu.using(cpu.Context(2, isa)):
                x, dy = bf16(tokens, k, seed=4).requires_grad_(), bf16(tokens, n, seed=5)
                y = ops.linear(x, cpu.pack(bf16(n, k, scale=k**-0.5)))
                results.append((y.detach(), *torch.autograd.grad(y, x, dy)))
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True)), tokens


@pytest.mark.parametrize("format", FORMATS_HERE)
def test_experts(native: str, format: str) -> None:
    """To the last bits only: around the products, the twins in plain C++ multiply and add in two steps."""
    e, h, i, r = 3, 96, 50, 5
    shapes = [(r, h), (e, i, r), (r, h), (e, i, r), (e, r, i), (h, r)]
    for tokens in TOKENS:
        results = []
        for isa in (native, f"{native}_emulated"):
            with cpu.using(cpu.Context(2, isa)):
                store = ExpertStore.from_tensors(
                    bf16(e, 2 * i, h, scale=h**-0.5), bf16(e, h, i, scale=i**-0.5, seed=1), format=format
                )
                factors = [bf16(*s, scale=0.05, seed=n).requires_grad_() for n, s in enumerate(shapes)]
                x = bf16(tokens, h, seed=7).requires_grad_()
                weights = bf16(tokens, 2, seed=8).requires_grad_()
                ids = torch.arange(2 * tokens).view(tokens, 2) % e
                lora = ops.ExpertLoraFactors(*factors, scale=2.0)
                out = ops.experts(store, x, ids, weights, lora=lora, keep=False)
                results.append([out, *torch.autograd.grad(out.square().sum(), [x, weights, *factors])])
        for got, want in zip(*results, strict=True):
            assert got.isfinite().all()
            assert relative(got, want) < 1e-4


def test_denormals_and_huge_numbers(native: str) -> None:
    x = torch.tensor([1e-39, -3e-39, 1e-20, 3e38, -3e38, 2.0**-126, 0.0, -0.0]).bfloat16().repeat(17, 5)
    weight = torch.tensor([1e-20, 1.0, 2e-19, 0.5, 0.25, 1e-3, 1e-39, 1e30]).bfloat16().repeat(9, 5)
    results = []
    for isa in (native, f"{native}_emulated"):
        with cpu.using(cpu.Context(2, isa)):
            results.append(ops.linear(x, cpu.pack(weight), out_dtype=torch.float32))
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))
