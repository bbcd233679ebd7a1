"""Entry of a runner's process: becomes the boxes' user, takes one request, answers, and ends.

A command has two such processes. The outer one, its guardian, only waits for the inner one, and then ends
whatever is left below; so a runner that is killed, for memory or by hand, takes its command along.
"""

from __future__ import annotations

import _signal
import os
import resource
import sys

from hetero.sandbox.launcher import brand, wire
from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher.files import OPERATIONS
from hetero.sandbox.runner import family
from hetero.sandbox.runner.command import execute
from hetero.sandbox.runner.trees import compare, fill

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TREES = {"fill": fill, "changes": compare}


def main() -> None:
    """Entry point: argv holds the channel, the lifeline, and a terminal's descriptor or -1."""
    channel, lifeline, tty = (int(text) for text in sys.argv[1:4])
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, _signal.SIG_IGN)  # meant for the owner, whose end is noticed
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    request = wire.receive(channel)
    if request is None:
        return
    try:
        brand.mark(request["box"])
        _become(request["outer"])
        if request["op"] == "exec":
            _guard(request, channel, lifeline, tty)
        else:
            wire.send(channel, _files(request))
    except OSError as error:
        _refuse(request, channel, error)


def _guard(request: dict[str, Any], channel: int, lifeline: int, tty: int) -> None:
    """Let a child run the command; end everything below when the child has ended, in whatever way."""
    _adopt(request)
    runner, handle = k.clone(0)
    if runner == 0:
        try:
            _adopt(request)
            execute(request, channel, lifeline, tty)
        except OSError as error:
            _refuse(request, channel, error)
        finally:
            os._exit(0)
    for number in (channel, handle):
        os.close(number)
    while os.waitpid(-1, 0)[0] != runner:
        pass
    family.end()


def _adopt(request: dict[str, Any]) -> None:
    k.prctl(k.PR_SET_CHILD_SUBREAPER, 1)
    if request["way"] == "landlock":
        family.enclose()


def _refuse(request: dict[str, Any], channel: int, error: OSError) -> None:
    text = f"{error.strerror or error} {error.filename or ''}".strip()
    wire.send(channel, {"error": text, "errno": error.errno or 5, "what": request["op"]})


def _become(outer: tuple[int, int]) -> None:
    """Be the user that owns the trees of boxes: an owner that is root is not root from here on."""
    uid, gid = outer
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    os.umask(0o022)


def _files(request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] in TREES:
        return {"ok": TREES[request["op"]](request)}
    request["root"] = os.open(request["tree"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return {"ok": OPERATIONS[request["op"]](request)}
    except OSError as error:
        return {"error": error.strerror or str(error), "errno": error.errno or 5}
