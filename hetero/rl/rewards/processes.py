"""What the reward supervisor needs of Linux: to own its descendants, and to end them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_TIDY = "sandbox-init"
"""Name of processes that end with their owner, and then remove what they have on disk and in the kernel."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can slip away."""
    _prctl(_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """End this process when `parent` ends, whatever it is doing."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def kill_tree(pid: int) -> None:
    """SIGKILL to a child that leads its own process group, to the group and to everything below, in other
    groups too.

    Launchers of sandboxes are left to end by themselves. The child must not have been waited for yet: until
    then its number cannot belong to anybody else.
    """
    below = descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    kill([pid, *(each for each in below if not _is_tidy(each))])


def _is_tidy(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n") == _TIDY
    except OSError:
        return False


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays waitable."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def reap(pid: int) -> str:
    """Wait for a child and say how it ended."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def reap_strays(known: Iterable[int]) -> None:
    """Wait for every ended child that is not among `known`: orphans that were adopted."""
    keep = set(known)
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in keep:
            return
        os.waitpid(found.si_pid, 0)


def end_all_descendants(patience: float = 2.0, tidy: float = 10.0) -> None:
    """Kill and wait for everything below this process; launchers of sandboxes have `tidy` seconds to end."""
    start = time.monotonic()
    while (below := descendants(os.getpid())) and (waited := time.monotonic() - start) < tidy + patience:
        kill(pid for pid in below if waited > tidy or not _is_tidy(pid))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.003)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
