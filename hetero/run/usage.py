"""What a step took of the machine."""

from __future__ import annotations

import os
import resource
import time

import torch

from hetero.kernels import cpu


class Usage:
    """Measures from when it is made: this process only, not the workers that compute rewards."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._cpu = _cpu_seconds()

    def metrics(self) -> dict[str, float]:
        """time/idle_cpu_frac: share of the time of our threads in which they did not compute.
        perf/peak_ram_gb: most RAM that the process ever had, in 10^9 bytes, loading included;
        perf/peak_vram_gb: likewise what PyTorch had of the GPU, where one is in use."""
        room = (time.perf_counter() - self._start) * cpu.context().threads
        busy = (_cpu_seconds() - self._cpu) / room if room > 0 else 0.0
        found = {
            "time/idle_cpu_frac": max(0.0, 1.0 - busy),
            "perf/peak_ram_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["perf/peak_vram_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return found


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system
