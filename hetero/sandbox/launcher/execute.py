"""Runs one command in a box from outside its PID namespace: what it returns cannot be touched from inside.

This worker (M) joins the box's namespaces but not its processes. It starts G, the init of a new PID namespace
that only reaps, then the command beside it as M's own child: M waits for it, times it and kills G at the
end, and the kernel kills everything that the command left behind.
"""

from __future__ import annotations

import _signal
import os
import select
import time

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.box import ENTERED, become
from hetero.sandbox.launcher.confine import OURS, become_command
from hetero.sandbox.launcher.groups import Seat
from hetero.sandbox.launcher.layers import changed_since, open_upper
from hetero.sandbox.launcher.pump import Pump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def execute(
    request: dict[str, Any], channel: int, box: tuple[int, int], lifeline: int, seat: Seat, tty: int
) -> None:
    """Run `request` and send its result on `channel`.

    Args:
        box: pid and pidfd of the box's first process.
        lifeline: readable when the box closes.
        seat: of the command in the box's control groups.
        tty: a terminal for the command's standard streams, or -1.
    """
    first, handle = box
    begun = time.time_ns()
    upper = open_upper(first)
    enter(handle, request["uid"], request["weaken"])
    nested = "pidns" not in request["weaken"]
    init = _start_init(seat) if nested else -1
    request["terminal"] = tty >= 0
    stdio, ours = _pipes(tty, request["stdin"] is not None)
    main, failure = _start_command(request, stdio, seat, nested)
    for handle in set(stdio):
        os.close(handle)
    pump = Pump(request, channel, lifeline, main[1], ours, upper)
    reason = _failed_start(failure)
    pump.exec_started = time.monotonic()
    pump.run(request["stdin"], freeze=_freezer)
    _, status, used = _finish(main, init, pump)
    result = _result(pump, status, used, reason, request["asked"])
    if request["changes"]:
        result["changed"] = changed_since(upper, begun, request["changes"])
    wire.send(channel, result)


def enter(box: int, uid: int, weaken: list[str]) -> None:
    """Join the box's namespaces, with a mount namespace and PID namespace of this worker's own."""
    flags = ENTERED & ~(k.CLONE_NEWNET if "network" in weaken else 0)
    k.setns(box, flags)
    become(uid)
    if "lifeline" not in weaken:
        k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
    k.unshare(k.CLONE_NEWNS | (k.CLONE_NEWPID if "pidns" not in weaken else 0))


def _start_init(seat: Seat) -> int:
    """Its pid. Nobody waits for what it does."""
    k.prctl(k.PR_SET_DUMPABLE, 0)  # and so are those that are forked from here: /proc tells nothing of them
    worker = k.pidfd_open(os.getpid())
    pid, handle = k.clone(0, seat.birth)
    if pid == 0:
        _init(seat, worker)
    for number in (worker, handle):
        os.close(number)
    return pid


def _init(seat: Seat, worker: int) -> None:
    """G: reaps until it is killed. `worker`: pidfd of M."""
    try:
        k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        if poll.poll(0):  # it was killed before that
            os._exit(1)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, [k.SIGCHLD])
        seat.take()
    except OSError:
        os._exit(1)
    k.close_all_but(())
    while True:
        _signal.sigwait([k.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _pipes(tty: int, with_input: bool) -> tuple[tuple[int, int, int], dict[str, int]]:
    """(the command's standard streams, our ends by name)."""
    if tty >= 0:
        return (tty, tty, tty), {}
    out, err = os.pipe(), os.pipe()
    ours = {"stdout": out[0], "stderr": err[0]}
    if not with_input:
        return (os.open("/dev/null", os.O_RDONLY), out[1], err[1]), ours
    inn = os.pipe()
    ours["stdin"] = inn[1]
    return (inn[0], out[1], err[1]), ours


def _start_command(
    request: dict[str, Any], stdio: tuple[int, int, int], seat: Seat, nested: bool
) -> tuple[tuple[int, int], int]:
    """((pid, pidfd), descriptor that tells why the exec failed)."""
    failure, report = os.pipe()
    pid, handle = k.clone(0, seat.birth)
    if pid == 0:
        become_command(request, stdio, seat, report, nested)
    os.close(report)
    return (pid, handle), failure


def _failed_start(failure: int) -> str:
    """Why the command could not be executed; "" when it was. Raises OSError when that was our doing."""
    text = os.read(failure, 4096).decode("utf-8", "replace")
    os.close(failure)
    if text.startswith(OURS):
        number, _, told = text.removeprefix(OURS).partition("|")
        raise OSError(int(number), told)
    return text


def _freezer(number: int) -> None:
    """Stop or continue everything in the command's PID namespace at once: a helper born in it signals -1."""
    pid, handle = k.clone(0)
    if pid == 0:
        try:
            os.kill(-1, number)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(handle)


def _finish(main: tuple[int, int], init: int, pump: Pump) -> tuple[int, int, Any]:
    """Kill what is left, wait for it, read the last output; (pid, wait status, usage) of the command."""
    if pump.reason:
        k.pidfd_signal(main[1], k.SIGKILL)
    if init >= 0 and pump.reason:
        os.kill(init, k.SIGKILL)
    found = os.wait4(main[0], 0)
    pump.drain()
    used = found[2]
    if init >= 0:
        alone = _is_alone()
        os.kill(init, k.SIGKILL)
        if alone:
            return found[0], found[1], (used.ru_utime + used.ru_stime, used.ru_maxrss)
        rest = os.wait4(init, 0)[2]
        pump.drain()
        return (
            found[0],
            found[1],
            (used.ru_utime + used.ru_stime + rest.ru_utime + rest.ru_stime, used.ru_maxrss),
        )
    return found[0], found[1], (used.ru_utime + used.ru_stime, used.ru_maxrss)


def _is_alone() -> bool:
    """Whether the init is the last process of the command's PID namespace: then its death is nobody else's,
    and nobody has to wait for it."""
    return not any(name.isdigit() and name != "1" for name in os.listdir("/proc"))


def _result(pump: Pump, status: int, used: tuple[float, int], failure: str, asked: float) -> dict[str, Any]:
    now = time.monotonic()
    signal = status & 0x7F
    number, _, text = failure.partition("|")
    return {
        "exit": None if signal else status >> 8,
        "signal": signal or None,
        "reason": pump.reason,
        "failure": text,
        "errno": int(number) if failure else 0,
        "stdout": pump.kept["stdout"].value(),
        "stderr": pump.kept["stderr"].value(),
        "bytes_out": sum(kept.total for kept in pump.kept.values()),
        "truncated": any(kept.truncated for kept in pump.kept.values()),
        "wall_s": now - pump.exec_started - pump.frozen_s,
        "start_s": pump.exec_started - asked,
        "cpu_s": used[0],
        "max_rss": max(used[1] * 1024, pump.meter.peak),
    }
