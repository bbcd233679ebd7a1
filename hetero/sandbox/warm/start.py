"""Entry of a warm interpreter: imports, says so, then forks into a box for every command handed over."""

from __future__ import annotations

import _signal
import gc
import importlib
import marshal
import os
import socket
import sys
from functools import partial
from typing import Any, NoReturn

from hetero.sandbox.inside import repl
from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.execute import execute
from hetero.sandbox.launcher.groups import Seat
from hetero.sandbox.launcher.start import hide_arguments

_LARGEST = 1 << 20
_MOST_HANDLES = 16
REPORT = 3
"""Descriptor on which a command that cannot start says why; closed when it has started."""


def main() -> None:
    """argv: the launcher's socket, the channel of the first answer, names of modules."""
    line, reply = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for name in sys.argv[3:]:
        try:
            importlib.import_module(name)
        except Exception as error:
            wire.send(reply, {"error": f"{name}: {type(error).__name__}: {error}", "errno": 2})
            return
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        wire.send(reply, {"error": f"the imports have started {threads - 1} threads", "errno": 22})
        return
    hide_arguments(b"python3")
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    wire.send(reply, {"ok": True})
    os.close(reply)
    while True:
        data, handles, _, _ = socket.recv_fds(line, _LARGEST, _MOST_HANDLES)
        if not data:
            return
        pid, _ = _fork()
        if pid == 0:
            line.close()
            _serve(data, handles)
        for handle in handles:
            os.close(handle)


def _fork() -> tuple[int, int]:
    pid, handle = k.clone(0)
    if pid:
        os.close(handle)
    return pid, handle


def _serve(data: bytes, handles: list[int]) -> NoReturn:
    """In the fork: what a worker of the launcher does for a command, but for how it starts."""
    request: dict[str, Any]
    request, first = marshal.loads(data)
    channel, box, lifeline, *groups, _done = handles
    try:
        k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
        k.close_all_but((0, 1, 2, *handles))
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        born = request.pop("born_in_group")
        seat = Seat(groups[0], tuple(groups[1:])) if born else Seat(-1, tuple(groups))
        request["start"] = partial(become, reseed="seed" not in request["weaken"])
        execute(request, channel, (first, box), lifeline, seat, -1)
    except OSError as error:
        wire.send(channel, {"error": str(error), "errno": error.errno or 5, "what": "warm exec"})
    finally:
        os._exit(0)


def become(argv: list[str], env: dict[str, str], reseed: bool = True) -> NoReturn:
    """The command: an interpreter that looks as if it had just been started in the box."""
    os.close(REPORT)
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hetero"]:
        del sys.modules[name]
    sys.argv = [""]
    if reseed:
        _reseed()
    gc.unfreeze()
    try:
        repl.main()
    finally:
        os._exit(0)


def _reseed() -> None:
    """Forks of one interpreter would draw the same numbers."""
    for name, function in (("random", "seed"), ("numpy.random", "seed")):
        module = sys.modules.get(name)
        if module is not None:
            getattr(module, function)()
