"""Sums of memory, CPU time and disk over one command's processes, for limits that the kernel does not add
up."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_SHORTEST, _LONGEST = 0.05, 1.0


class Meter:
    """Looks at the PID namespace's /proc and at the upper layer from time to time.

    `check` returns which limit was passed: "memory", "cpu", "disk", or "" for none. It looks less often when
    looking is slow, so that it takes at most a few per cent of one core.
    """

    def __init__(self, limits: dict[str, Any], upper: int) -> None:
        self._memory, self._cpu, self._disk = limits["memory"], limits["cpu"], limits["disk"]
        self._inodes = limits["inodes"]
        self._upper = upper
        self._pause = _SHORTEST
        self.next = time.monotonic() + _SHORTEST
        self.peak = 0

    def check(self, now: float) -> str:
        """Look, if it is time to."""
        if now < self.next:
            return ""
        memory, cpu = self._processes()
        self.peak = max(self.peak, memory)
        passed = ""
        if self._memory and memory > self._memory:
            passed = "memory"
        elif self._cpu and cpu > self._cpu:
            passed = "cpu"
        elif self._upper >= 0 and (self._disk or self._inodes):
            size, count = usage(self._upper)
            if size > self._disk or count > self._inodes:
                passed = "disk"
        after = time.monotonic()
        self._pause = min(max(self._pause * 1.3, 30 * (after - now)), _LONGEST)
        self.next = after + self._pause
        return passed

    def _processes(self) -> tuple[int, float]:
        memory, ticks = 0, 0
        for name in os.listdir("/proc"):
            if not name.isdigit() or name == "1":
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            memory += int(fields[21]) * _PAGE
            ticks += sum(int(field) for field in fields[11:15])
        shared = os.statvfs("/dev/shm")
        memory += (shared.f_blocks - shared.f_bfree) * shared.f_frsize
        return memory, ticks / _TICKS


def usage(directory: int) -> tuple[int, int]:
    """(bytes, entries) below an open directory, links not followed."""
    size, count = 0, 0
    pending = [os.dup(directory)]
    while pending:
        handle = pending.pop()
        try:
            with os.scandir(handle) as entries:
                for entry in entries:
                    count += 1
                    try:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                            pending.append(os.open(entry.name, flags, dir_fd=handle))
                    except OSError:
                        continue
        finally:
            os.close(handle)
    return size, count
