"""A mark that every process of a box carries and none can take off: the limit of file locks, which Linux no
longer counts. It is inherited, it can only be lowered, and the system call filter pretends to set it.

It finds what is left of a box whose runner and guardian were both killed.
"""

from __future__ import annotations

import os
import resource
import time

RLIMIT_LOCKS = 10
_MARK = 1 << 48
_PATIENCE_S, _LOOKS = 10.0, 20
_ROUNDS, _BEHIND, _AHEAD = 20, 4, 8


def mark(box: str) -> None:
    """Mark this process and all that it will start as of that box. Raises OSError."""
    number = _number(box)
    try:
        resource.setrlimit(RLIMIT_LOCKS, (number, number))
    except ValueError as error:
        raise OSError(
            1, f"the hard limit of file locks is lowered here ({error}); leave it unlimited"
        ) from None


def bearers(boxes: set[str]) -> list[int]:
    """Living processes that bear the mark of one of `boxes`."""
    marks = {str(_number(box)) for box in boxes}
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _bears(name, marks)]


def _bears(pid: str, marks: set[str]) -> bool:
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii") as file:
            row = next((row for row in file if row.startswith("Max file locks")), "")
        if not marks & set(row.split()[3:5]):
            return False
        with open(f"/proc/{pid}/stat", "rb") as status:
            return status.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def end(boxes: set[str]) -> None:
    """Kill all processes of `boxes` and wait until none is left. Raises OSError if some will not end.

    That a look finds nobody says that nobody is left if no process was made meanwhile; on a machine where
    that never holds, as many looks have to do.
    """
    marks = {str(_number(box)) for box in boxes}
    until, looks = time.monotonic() + _PATIENCE_S, _LOOKS if boxes else 0
    while looks:
        newest = _newest()
        left = bearers(boxes)
        for pid in left:
            _kill(pid)
        if _newest() == newest and not left:
            return
        looks = _LOOKS if _chase(marks) or left else looks - 1
        if time.monotonic() > until:
            raise OSError(16, f"processes of a closed sandbox do not end: {left[:10]}")


def _chase(marks: set[str]) -> bool:
    """Kill whom no list of processes shows, because it becomes another one all the time: from numbers that
    were given lately upwards, faster than new ones are given. Whether there was one."""
    found = False
    for _ in range(_ROUNDS):
        newest = _newest()
        for pid in range(max(newest - _BEHIND, 2), newest + _AHEAD):
            if _bears(str(pid), marks):
                _kill(pid)
                found = True
    return found


def _newest() -> int:
    """Number of the process that was made last."""
    with open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split()[4])


def _kill(pid: int) -> None:
    try:  # noqa: SIM105 (contextlib is large)
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def end_below(run: str) -> None:
    """`end` the boxes whose directories are in a run's. Raises OSError."""
    try:
        names = os.listdir(f"{run}/boxes")
    except FileNotFoundError:
        return
    end({name.partition("-")[0] for name in names})


def _number(box: str) -> int:
    return _MARK | int(box, 16)
