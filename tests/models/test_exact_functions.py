"""Functions inside a module's own forward, routed through the kernels: right, and free of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetero.models.exact import FrozenMatrix, run_exactly


class Router(nn.Module):
    """Every function that routers of known families use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(12, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 12), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = functional.linear(x.type(torch.float32), self.weight.type(torch.float32), self.bias)
        scores = logits.sigmoid()
        groups = scores.view(-1, 4, 3).topk(2, dim=-1)[0].sum(dim=-1)
        best, ids = torch.topk(functional.softmax(logits, dim=-1, dtype=torch.float32), 3, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        return logits, scores, groups, best, ids, functional.silu(logits), functional.gelu(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_pytorch(dtype: torch.dtype) -> None:
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, exact = Router(dtype), Router(dtype)
    run_exactly(exact)
    for got, want in zip(exact(x), plain(x.float()), strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = Router(torch.float32)
    run_exactly(exact)
    whole = exact(x)
    for rows in (slice(0, 1), slice(7, 9), slice(5, 33)):
        assert all(torch.equal(got, want[rows]) for got, want in zip(exact(x[rows]), whole, strict=True))


def test_ties_go_to_the_lower_expert_and_bf16_logits_stay_wide() -> None:
    router = Router(torch.bfloat16)
    router.weight.zero_()
    router.bias.zero_()
    run_exactly(router)
    logits, _, _, _, ids, *_ = router(torch.ones(5, 40).bfloat16())
    assert logits.dtype == torch.float32
    assert ids.tolist() == [[0, 1, 2]] * 5


def test_gradients_reach_the_input() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    grads = []
    for exact in (True, False):
        router = Router(torch.bfloat16)
        if exact:
            run_exactly(router)
        leaf = (x if exact else x.float()).clone().requires_grad_()
        _, scores, groups, best, *_ = router(leaf)
        (scores.square().sum() + groups.sum() + best[:, 0].sum()).backward()
        grads.append(leaf.grad.float())
    torch.testing.assert_close(*grads, rtol=0.03, atol=0.03)


class Normalised(nn.Module):
    """Divides in place by a sum, as Mixtral's router does."""

    def forward(self, x: Tensor) -> Tensor:
        best, _ = torch.topk(functional.softmax(x, dim=-1), 1, dim=-1)
        best /= best.sum(dim=-1, keepdim=True)
        return best


def test_a_sum_of_one_term_is_no_view() -> None:
    module = Normalised()
    run_exactly(module)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(4)).requires_grad_()
    out = module(x)
    out.sum().backward()
    assert torch.equal(out, torch.ones(4, 1))
    assert float(x.grad.abs().max()) < 1e-6


def test_a_changed_weight_is_packed_again() -> None:
    router = Router(torch.float32)
    run_exactly(router)
    x = torch.ones(2, 40).bfloat16()
    before = router(x)[0]
    with torch.no_grad():
        router.weight.mul_(2)
    after = router(x)[0]
    torch.testing.assert_close(after - router.bias, 2 * (before - router.bias))


def test_an_fp32_matrix_keeps_24_bits() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    matrix = FrozenMatrix(weight)
    assert len(matrix.parts) == 3
    assert len(FrozenMatrix(weight.bfloat16()).parts) == 1
    one_hot = torch.eye(64).bfloat16()
    assert torch.equal(matrix.apply(one_hot, None), weight.T)
