"""The test of the test: one operation that depends on the batch, planted, and the property must fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from exact_cases import Case, built, cases, differences
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor
from torch.nn import functional

from hetero.engine.model_runner import ModelRunner
from hetero.kernels import cpu, ops
from hetero.models import LmHead
from hetero.models.linear import HeteroLinear

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


def dense(module: HeteroLinear, x: Tensor, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What a linear layer computes, adapter included, with another matrix product."""
    assert module.packed is not None
    out = linear(x.float(), module.packed.unpack().float())
    if module.bias is not None:
        out = out + module.bias
    runs = module.lora if isinstance(module.lora, ops.Runs) else ops.Runs((module.lora,), (x.shape[-2],))
    for lora, first, end in zip(runs.parts, (0, *runs.ends), runs.ends, strict=False):
        if lora is not None:
            rows = x[..., first:end, :].float()
            out[..., first:end, :] += lora.scale * linear(linear(rows, lora.a.float()), lora.b.float())
    return out.to(x.dtype)


def in_projections(patch: pytest.MonkeyPatch, linear: Callable[[Tensor, Tensor], Tensor]) -> None:
    patch.setattr(HeteroLinear, "forward", lambda module, x: dense(module, x, linear))


@plant
def matrix_product_of_torch(patch: pytest.MonkeyPatch) -> None:
    """Found where torch's own product depends on the number of rows: not everywhere, but here we ask."""
    generator = torch.Generator().manual_seed(0)
    for k in (17, 64, 99):
        x, w = torch.randn(64, k, generator=generator), torch.randn(33, k, generator=generator)
        if not torch.equal(functional.linear(x, w)[:1], functional.linear(x[:1], w)):
            break
    else:
        pytest.skip("torch's matrix product does not depend on the number of rows on this machine")
    in_projections(patch, functional.linear)


@plant
def split_of_k_by_the_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        parts = 1 if x[..., 0].numel() < 8 else 3
        products = [a[..., None, :] * b for a, b in zip(x.chunk(parts, -1), w.chunk(parts, -1), strict=True)]
        return torch.stack([product.sum(-1) for product in products]).sum(0)

    in_projections(patch, linear)


@plant
def router_softmax_in_the_order_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    """In bf16, as many kernels have it: in fp32 the rounding that follows hides most of such a difference."""

    def softmax(x: Tensor) -> Tensor:
        exps = (x - x.amax(-1, keepdim=True)).exp().bfloat16()
        total = torch.zeros_like(exps[..., 0])
        for column in exps.roll(x[..., 0].numel(), -1).unbind(-1):
            total = total + column
        return (exps / total[..., None]).float()

    patch.setattr(ops, "softmax", softmax)


@plant
def norm_by_the_number_of_threads(patch: pytest.MonkeyPatch) -> None:
    exact = ops.rms_norm

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *rest: Any, **options: Any) -> Tensor:
        return exact(x, weight, eps * (1 + cpu.context().threads % 2), *rest, **options)

    patch.setattr(ops, "rms_norm", rms_norm)


@plant
def head_by_the_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    exact = LmHead.logits

    def logits(head: LmHead, hidden: Tensor) -> Tensor:
        out = exact(head, hidden)
        return out if hidden.shape[0] > 1 else out * (1 + 2.0**-20)

    patch.setattr(LmHead, "logits", logits)


@plant
def sampler_without_the_adapter(patch: pytest.MonkeyPatch) -> None:
    exact = ModelRunner.forward

    def forward(runner: ModelRunner, token_ids: Tensor, *batch: Any) -> Tensor:
        return exact(runner, token_ids, *batch[:-1], [("base", len(token_ids))])

    patch.setattr(ModelRunner, "forward", forward)


@plant
def cache_that_outlives_an_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelRunner, "namespace", lambda runner, version=None: "policy:0")
    patch.setattr(ModelRunner, "resident", lambda runner: {"policy:0"})
    patch.setattr(ModelRunner, "_weights", lambda runner, runs: nullcontext())


@plant
def adapter_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    """One row too many for the first of several versions in a batch."""
    exact = ModelRunner._weights

    def weights(runner: ModelRunner, runs: Any) -> Any:
        if len(runs) > 1 and runs[1][1] > 1:
            (first, rows), (second, more), *rest = runs
            runs = [(first, rows + 1), (second, more - 1), *rest]
        return exact(runner, runs)

    patch.setattr(ModelRunner, "_weights", weights)


@plant
def versions_that_follow_the_masters(patch: pytest.MonkeyPatch) -> None:
    """A kept version that is not a copy."""
    patch.setattr(ops.LoraFactors, "frozen", lambda factors, dtype=None: factors)
    patch.setattr(ops.ExpertLoraFactors, "frozen", lambda factors, experts: factors)


@pytest.mark.filterwarnings("ignore:.*whose results may depend on the batch")
@pytest.mark.parametrize("name", list(PLANTS))
def test_the_property_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def rollout_equals_training(case: Case) -> None:
        with built(case) as model:
            for what, value in differences(model, case, cpu.isas()[-1]):
                assert value == 0.0, what

    PLANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"rollout|tokens"):
        rollout_equals_training()
