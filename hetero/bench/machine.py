"""The machine as this very run finds it: every share that is reported is a share of these figures."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.kernels import cpu
from hetero.kernels.cpu.probe import peak_flops, read_bandwidth


@dataclass(frozen=True, slots=True)
class Machine:
    """Attributes:
    cpu: the processor's own name.
    isa: the instruction set that kernels use by default.
    threads: of the kernel pool.
    read_bandwidth: bytes per second that all threads together read from memory.
    peak_flops: floating-point operations per second of all threads, by instruction set.
    """

    cpu: str
    isa: str
    threads: int
    read_bandwidth: float
    peak_flops: dict[str, float] = field(default_factory=dict)

    @classmethod
    def measure(cls, threads: int | None = None, isas: tuple[str, ...] = ()) -> Machine:
        """Measure for some seconds: bandwidth over 1 GB, the peak of every instruction set that runs here
        and of `isas` besides (an emulated one, in tests)."""
        ctx = cpu.Context(threads=threads)
        names = dict.fromkeys((*cpu.isas(), *isas))
        peaks = {name: peak_flops(cpu.Context(threads=ctx.threads, isa=name)) for name in names}
        return cls(cpu_name(), ctx.isa, ctx.threads, read_bandwidth(ctx), peaks)

    def as_record(self) -> dict[str, Any]:
        return {
            "op": "machine",
            "cpu": self.cpu,
            "isa": self.isa,
            "threads": self.threads,
            "read_gbps": self.read_bandwidth / 1e9,
            "peak_tflops": {name: peak / 1e12 for name, peak in self.peak_flops.items()},
        }


def cpu_name() -> str:
    """The processor's name as Linux gives it, else the architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()
