"""Norms of an adapter against the matrices that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero.kernels import ops
from hetero.models import LoraConfig, load_model, lora_parameters
from hetero.models.lora import lora_factors
from hetero.models.lora_norms import adapter_norms


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
def test_norms_are_those_of_the_matrices(layout: str, checkpoint: Callable[[str], Path]) -> None:
    lora = LoraConfig(rank=3, alpha=5.0, expert_layout=layout)  # type: ignore[arg-type]
    model = load_model(checkpoint("mixtral"), device="cpu", lora=lora)
    fresh = adapter_norms(model)
    assert fresh["lora/delta_norm"] == 0.0
    assert fresh["lora/ab_norm"] > 0.0
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(torch.randn(master.shape, generator=torch.Generator().manual_seed(1)))
    delta = own = 0.0
    for factors in lora_factors(model).values():
        parts = (
            [(factors.a, factors.b)]
            if isinstance(factors, ops.LoraFactors)
            else [(getattr(factors, f"{p}_a"), getattr(factors, f"{p}_b")) for p in ("gate", "up", "down")]
        )
        for a, b in parts:
            delta += float((factors.scale * (b.double() @ a.double())).square().sum())
    for master in lora_parameters(model).values():
        own += float(master.double().square().sum())
    found = adapter_norms(model)
    assert found["lora/delta_norm"] == pytest.approx(math.sqrt(delta), rel=1e-5)
    assert found["lora/ab_norm"] == pytest.approx(math.sqrt(own), rel=1e-5)


def test_a_model_without_an_adapter_has_none(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    assert adapter_norms(model) == {"lora/delta_norm": 0.0, "lora/ab_norm": 0.0}
