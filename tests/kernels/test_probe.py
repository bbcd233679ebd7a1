"""The probes of the machine: what they count, not how fast it is."""

from __future__ import annotations

import pytest
import torch

from hetero import _C
from hetero.kernels import cpu
from hetero.kernels.cpu import probe

FLOPS_PER_ROUND = {
    "scalar": 2 * 48,
    "avx2": 2 * 12 * 8,
    "avx512": 2 * 12 * 16,
    "avx512vnni": 2 * 12 * 16,
    "avx512bf16": 2 * 12 * 32,
    "avx512bf16_emulated": 2 * 12 * 32,
    "amx": 2 * 6 * 16 * 16 * 32,
    "amx_emulated": 2 * 6 * 16 * 16 * 32,
}


@pytest.mark.parametrize("isa", cpu.isas(emulated=True))
@pytest.mark.parametrize("threads", [1, 3])
def test_multiply_adds_are_counted(isa: str, threads: int) -> None:
    ctx = cpu.Context(threads=threads, isa=isa)
    assert _C.run_multiply_adds(ctx.handle, 160) == threads * 160 * FLOPS_PER_ROUND[isa]


@pytest.mark.parametrize("num_bytes", [64, 1 << 20, (1 << 20) + 64, 5 * (1 << 20) - 64])
def test_every_word_is_read(num_bytes: int) -> None:
    words = torch.randint(-(2**62), 2**62, (num_bytes // 8,), generator=torch.Generator().manual_seed(0))
    folded = 0
    for word in words.tolist():
        folded ^= word & (2**64 - 1)
    assert _C.read_stream(cpu.Context(threads=2).handle, words.view(torch.uint8)) == folded


def test_a_torn_line_is_refused() -> None:
    with pytest.raises(ValueError, match="has 65 bytes; expected a multiple of 64"):
        _C.read_stream(cpu.Context(threads=1).handle, torch.zeros(65, dtype=torch.uint8))


def test_rates_are_positive() -> None:
    ctx = cpu.Context(threads=1)
    assert probe.read_bandwidth(ctx, nbytes=1 << 22, repeats=1) > 1e6
    assert probe.peak_flops(ctx, seconds=1e-4, repeats=1) > 1e6
