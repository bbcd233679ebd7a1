"""A machine that need not be measured."""

from __future__ import annotations

import pytest

from hetero.bench.machine import Machine
from hetero.kernels import cpu


@pytest.fixture
def machine() -> Machine:
    peaks = dict.fromkeys(cpu.isas(emulated=True), 1e11)
    return Machine("a processor", cpu.context().isa, 1, 1e10, peaks)
