"""What the machine gives: read bandwidth, which bounds decoding, and peak, which bounds training."""

from __future__ import annotations

from collections.abc import Iterator

from hetero.doctor.finding import Finding, judge
from hetero.kernels import cpu
from hetero.kernels.cpu.probe import peak_flops, read_bandwidth

STREAM = 1 << 28
"""Bytes of the bandwidth probe: enough for a glance, and room for it is on every machine."""
SLOWEST = 1e9
"""Bytes per second that any memory gives; less is swapping."""
GAIN = 0.8
"""What all threads must give of one thread's peak: hardware threads of one core gain nothing, but lose
nothing either."""


def check_speed() -> Iterator[Finding]:
    """Bandwidth and peak of the kernels' threads, measured for less than a second each."""
    ctx = cpu.context()
    bandwidth = read_bandwidth(ctx, STREAM)
    yield judge(
        "speed/read_bandwidth",
        bandwidth > SLOWEST,
        f"{bandwidth / 1e9:.1f} GB/s",
        "Memory is as slow as a disk: the machine swaps. End other programs, or take a smaller model.",
    )
    peak, alone = peak_flops(ctx), peak_flops(cpu.Context(threads=1, isa=ctx.isa))
    gain = peak / alone
    yield judge(
        "speed/peak",
        ctx.threads == 1 or gain > GAIN,
        f"{peak / 1e9:.0f} GFLOP/s with {ctx.threads} threads, {gain:.1f} times one thread",
        f"{ctx.threads} threads are slower than one: other programs take the processors, or a container "
        "limits them. End them, raise the limit, or set model.threads to 1.",
    )
