"""Everything below this process: found, counted, stopped and ended, where no PID namespace does it.

The runner adopts orphans, so a process cannot leave the family by losing its parent. Where Landlock holds
signals in, one system call reaches all members at once, also those that fork faster than anybody can look.
"""

from __future__ import annotations

import os
import time

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import landlock
from hetero.sandbox.launcher.meter import Meter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 10.0
_enclosed = False


def members() -> dict[int, list[bytes]]:
    """pid -> fields of /proc/PID/stat after the name, of every living process below this one."""
    children: dict[int, list[int]] = {}
    fields: dict[int, list[bytes]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                found = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        fields[int(name)] = found
        children.setdefault(int(found[1]), []).append(int(name))
    below = list(children.get(os.getpid(), ()))
    for pid in below:
        below += children.get(pid, ())
    return {pid: fields[pid] for pid in below if fields[pid][0] != b"Z"}


def enclose() -> None:
    """Let signals of this process reach nobody but the family. Raises OSError."""
    global _enclosed
    landlock.enclose()
    _enclosed = True


def signal(number: int) -> None:
    """Signal all; by looking for them, until a look finds nobody new: a stopped process cannot fork."""
    if _enclosed:
        os.kill(-1, number)
        return
    known: set[int] = set()
    while fresh := set(members()) - known:
        known |= fresh
        for pid in fresh:
            _kill(pid, number)


def end() -> tuple[float, int]:
    """Kill all and wait for them: (CPU seconds, largest resident bytes). Raises OSError if some will not
    end."""
    until = time.monotonic() + _PATIENCE_S
    signal(k.SIGSTOP)
    cpu_s, peak = 0.0, 0
    while True:
        signal(k.SIGKILL)
        while True:
            try:
                pid, _, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return cpu_s, peak
            if pid == 0:
                break
            cpu_s += used.ru_utime + used.ru_stime
            peak = max(peak, used.ru_maxrss * 1024)
        if time.monotonic() > until:
            raise OSError(16, f"processes of the command do not end: {sorted(members())[:10]}")
        time.sleep(0.001)


def _kill(pid: int, number: int) -> None:
    try:  # noqa: SIM105 (contextlib is large)
        os.kill(pid, number)
    except OSError:  # it has ended
        pass


class FamilyMeter(Meter):
    """Sums over the family instead of over a PID namespace; counts its processes, too, and reaps orphans but
    for `main`, the command's first process.

    Attributes:
        ended_s: CPU seconds of what was reaped.
    """

    def __init__(self, limits: dict[str, Any], upper: int, main: int) -> None:
        super().__init__(limits, upper)
        self._main, self.ended_s = main, 0.0
        self._most = limits["processes"]
        self._guardian = os.getppid()
        self._count = 0

    def check(self, now: float) -> str:
        """Look, if it is time to; "processes" is one more limit. Without its guardian nothing goes on."""
        passed = super().check(now) or ("killed" if os.getppid() != self._guardian else "")
        return passed or ("processes" if self._most and self._count > self._most else "")

    def _reap(self) -> None:
        found = os.WEXITED | os.WNOHANG
        while (ended := os.waitid(os.P_ALL, 0, found | os.WNOWAIT)) and ended.si_pid != self._main:
            used = os.wait4(ended.si_pid, 0)[2]
            self.ended_s += used.ru_utime + used.ru_stime
            self.peak = max(self.peak, used.ru_maxrss * 1024)

    def _processes(self) -> tuple[int, float]:
        self._reap()
        found = members().values()
        self._count = len(found)
        memory = sum(int(fields[21]) * _PAGE for fields in found)
        ticks = sum(int(field) for fields in found for field in fields[11:15])
        return memory, self.ended_s + ticks / _TICKS
