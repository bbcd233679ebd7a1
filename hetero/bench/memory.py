"""How many copies of the weights a case rotates over, so that no cache holds them."""

from __future__ import annotations

from pathlib import Path

from hetero.errors import CapacityError

MOST_COPIES = 1024
"""Of a weight that is small: packing many takes longer than the benchmark."""

SHARE = 0.7
"""Of the memory that is free now, the part that a benchmark may fill."""


def available_bytes() -> int:
    """Bytes that this process can still use: what Linux calls available, no more than its cgroup has left."""
    limits = [_meminfo("MemAvailable")]
    cgroup = Path("/sys/fs/cgroup")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used)
    return max(0, min(limits))


def num_copies(copy_bytes: int, build_bytes: int, at_least: int) -> int:
    """Copies of `copy_bytes` to rotate over when building them takes `build_bytes` besides.

    Raises:
        CapacityError: not even one fits.
    """
    room = int(SHARE * available_bytes()) - build_bytes
    if room < copy_bytes:
        raise CapacityError(
            f"one layer needs {(copy_bytes + build_bytes) / 1e9:.1f} GB while it is packed and "
            f"{SHARE:.0%} of the free memory is {SHARE * available_bytes() / 1e9:.1f} GB; use a format with "
            "fewer bits, or give the shape by numbers with fewer experts (E=...)"
        )
    return min(max(1, -(-at_least // copy_bytes)), room // copy_bytes, MOST_COPIES)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # not told: no limit


def _number(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
