"""Every kernel test runs once per instruction set that this processor can run, the emulated ones included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero.kernels import cpu


@pytest.fixture(params=cpu.isas(emulated=True))
def ctx(request: pytest.FixtureRequest) -> Iterator[cpu.Context]:
    """A context with two threads of each instruction set, in use during the test."""
    with cpu.using(cpu.Context(2, request.param)) as context:
        yield context
