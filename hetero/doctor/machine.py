"""The processor: instruction set, threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from hetero.doctor.finding import Finding, judge
from hetero.kernels import cpu

FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "avx512vnni": {"avx512_vnni"},
    "avx512bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}
"""What /proc/cpuinfo must list for each instruction set, beside what the plainer ones need."""


def check_machine() -> Iterator[Finding]:
    """Instruction set in use, and threads."""
    yield instruction_set(cpu_flags(), cpu.isas(), cpu.isa())
    yield threads(cpu.context().threads, sorted(os.sched_getaffinity(0)), cpu_quota())


def instruction_set(flags: set[str], runnable: list[str], used: str) -> Finding:
    """Whether the best kernels are in use that the processor can run, and why none better are."""
    best, missing = runnable[-1], ""
    for name, needed in FLAGS.items():
        if name in runnable:
            continue
        if needed <= flags and not missing:
            fix = (
                f"The processor lists {', '.join(sorted(needed))}, but the operating system or hypervisor "
                f"does not let programs use them. Kernels for {name} would be faster: run on Linux 5.16 or "
                "newer, and let the virtual machine pass these features through."
            )
            return Finding("kernels/isa", False, f"{used} ({name} is refused)", fix)
        missing = missing or f"; no {name}: the processor lacks {', '.join(sorted(needed - flags)) or name}"
    fix = f"HETERO_ISA={os.environ.get('HETERO_ISA', '')} asks for it; unset HETERO_ISA to use {best}."
    return judge("kernels/isa", used == best, f"{used} of {', '.join(runnable)}{missing}", fix)


def threads(used: int, allowed: list[int], quota: float) -> Finding:
    """Whether there is a processor for each thread of the kernels."""
    room = min(len(allowed), max(1, math.ceil(quota))) if math.isfinite(quota) else len(allowed)
    limit = f", cgroup quota {quota:g}" if math.isfinite(quota) else ""
    return judge(
        "kernels/threads",
        used <= room,
        f"{used} threads on {len(allowed)} of {os.cpu_count()} processors{limit}",
        "More threads than processors wait for each other at every step: set model.threads to at most "
        f"{room}, or give the process more processors (taskset, cgroup, container limits).",
    )


def cpu_flags() -> set[str]:
    """The features of the first processor in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def cpu_quota() -> float:
    """The smallest quota of the cgroups (version 2) of this process, in processors; infinite without one."""
    quota = math.inf
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::")[2].strip()
    except OSError:
        return quota
    place = Path("/sys/fs/cgroup") / group.lstrip("/")
    for folder in (place, *place.parents):
        file = folder / "cpu.max"
        share, _, period = (file.read_text(encoding="utf-8") if file.is_file() else "max").partition(" ")
        if share.strip() != "max":
            quota = min(quota, int(share) / int(period))
    return quota
