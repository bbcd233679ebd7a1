"""max |logp_rollout - logp_train| == 0.0, whatever the model, the batch and the machine's settings."""

from __future__ import annotations

from typing import Any

import pytest
from exact_cases import EXPERTS, Case, built, cases, differences
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero.kernels.cpu import isas

ISAS = isas(emulated=True)
FAST = [isa for isa in isas() if isa != "scalar"]
SLOW = [isa for isa in ISAS if isa not in FAST]
COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def check(case: Case, isa: str) -> None:
    with built(case) as model:
        for what, value in differences(model, case, isa):
            assert value == 0.0, f"{what} differ by {value} under {isa}"


@pytest.mark.parametrize("isa", FAST)
@settings(max_examples=6, derandomize=True, **COMMON)
@given(case=cases())
def test_rollout_equals_training(isa: str, case: Case) -> None:
    check(case, isa)


@pytest.mark.parametrize("isa", SLOW)
@settings(max_examples=2, derandomize=True, **COMMON)
@given(case=cases())
def test_rollout_equals_training_in_plain_and_emulated_kernels(isa: str, case: Case) -> None:
    check(case, isa)


@pytest.mark.parametrize("experts", EXPERTS)
@settings(max_examples=2, derandomize=True, **COMMON)
@given(data=st.data())
def test_rollout_equals_training_in_every_format(experts: str, data: st.DataObject) -> None:
    check(data.draw(cases(experts)), isas()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=100, print_blob=True, phases=[Phase.explicit, Phase.reuse, Phase.generate], **COMMON)
@given(case=cases())
def test_rollout_equals_training_at_length(isa: str, case: Case) -> None:
    check(case, isa)
