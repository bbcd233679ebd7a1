"""What this machine gives at most: read bandwidth and the peak of an instruction set, measured now."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hetero import _C
from hetero.kernels.cpu.context import Context
from hetero.kernels.cpu.packed import PANEL, PackedWeight

STREAM_BYTES = 1 << 30
"""Bytes of one bandwidth probe: more than any last-level cache that its result is used beside."""


def read_bandwidth(ctx: Context, nbytes: int = STREAM_BYTES, repeats: int = 3) -> float:
    """Bytes per second at which all threads of `ctx` together read memory, the best of `repeats` passes.

    The memory is had in the same way as that of packed weights: huge pages where there are any.
    """
    rows = max(1, nbytes // (2 * PANEL * PANEL)) * PANEL
    data = PackedWeight.empty(1, rows, PANEL).data.view(torch.uint8).fill_(1)
    best = min(_seconds(lambda: _C.read_stream(ctx.handle, data)) for _ in range(repeats))
    return data.numel() / best


def peak_flops(ctx: Context, seconds: float = 0.03, repeats: int = 5) -> float:
    """Floating-point operations per second of all threads of `ctx` on multiply-adds from registers alone,
    in the form that the instruction set's own products are made of; the best of `repeats` runs."""
    rounds = 1 << 10
    flops, took = _multiply_adds(ctx, rounds)
    while took < seconds:
        rounds *= 2
        flops, took = _multiply_adds(ctx, rounds)
    best = flops / took
    for _ in range(repeats - 1):
        flops, took = _multiply_adds(ctx, rounds)
        best = max(best, flops / took)
    return best


def _multiply_adds(ctx: Context, rounds: int) -> tuple[float, float]:
    """(floating-point operations, seconds)"""
    start = time.perf_counter()
    flops = _C.run_multiply_adds(ctx.handle, rounds)
    return flops, time.perf_counter() - start


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
