"""Runs one command of a copied tree: starts it in the tier's way, waits, ends all that it left behind."""

from __future__ import annotations

import os
import time

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.layers import changed_since
from hetero.sandbox.launcher.pump import Pump
from hetero.sandbox.runner import family, wrapped
from hetero.sandbox.runner.bare import Bare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WAYS: dict[str, type[Bare] | type[wrapped.Wrapped]] = {
    "landlock": Bare,
    "bwrap": wrapped.Bubblewrap,
    "gvisor": wrapped.Gvisor,
}


def execute(request: dict[str, Any], channel: int, lifeline: int, tty: int) -> None:
    """Run `request` and send its result on `channel`. `lifeline`: readable when the box closes."""
    begun = time.time_ns()
    upper = os.open(request["tree"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    request["terminal"] = tty >= 0
    stdio, ours = _streams(tty, request["stdin"] is not None)
    way = WAYS[request["way"]](request)
    try:
        main = way.start(stdio)
        for handle in set(stdio):
            os.close(handle)
        pump = Pump(request, channel, lifeline, main[1], ours, upper)
        pump.meter = meter = family.FamilyMeter(request["sums"], upper, main[0])
        pump.exec_started = time.monotonic()
        pump.run(request["stdin"], freeze=family.signal)
        if pump.reason:
            family.signal(k.SIGKILL)
        _, status, used = os.wait4(main[0], 0)
        wall_s = time.monotonic() - pump.exec_started - pump.frozen_s
        pump.drain()
        left_s, left_peak = family.end()
        pump.drain()
        result = way.outcome(status, {name: kept.value() for name, kept in pump.kept.items()})
    finally:
        way.clean()
    result |= {
        "reason": pump.reason,
        "bytes_out": sum(kept.total for kept in pump.kept.values()),
        "truncated": any(kept.truncated for kept in pump.kept.values()),
        "wall_s": wall_s,
        "start_s": pump.exec_started - request["asked"],
        "cpu_s": used.ru_utime + used.ru_stime + left_s + meter.ended_s,
        "max_rss": max(used.ru_maxrss * 1024, left_peak, pump.meter.peak),
    }
    if request["changes"]:
        result["changed"] = changed_since(upper, begun, request["changes"])
    wire.send(channel, result)


def _streams(tty: int, with_input: bool) -> tuple[tuple[int, int, int], dict[str, int]]:
    """(the command's standard streams, our ends by name)."""
    if tty >= 0:
        return (tty, tty, tty), {}
    out, err = os.pipe(), os.pipe()
    ours = {"stdout": out[0], "stderr": err[0]}
    if not with_input:
        return (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), out[1], err[1]), ours
    inn = os.pipe()
    ours["stdin"] = inn[1]
    return (inn[0], out[1], err[1]), ours
