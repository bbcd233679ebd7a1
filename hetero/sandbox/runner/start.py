"""Entry of a runner's process: becomes the boxes' user, takes one request, answers, and ends."""

from __future__ import annotations

import os
import resource
import sys

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.files import OPERATIONS
from hetero.sandbox.runner.command import execute
from hetero.sandbox.runner.trees import compare, fill

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TREES = {"fill": fill, "changes": compare}


def main() -> None:
    """Entry point: argv holds the channel, the lifeline, and a terminal's descriptor or -1."""
    channel, lifeline, tty = (int(text) for text in sys.argv[1:4])
    k.prctl(k.PR_SET_CHILD_SUBREAPER, 1)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    request = wire.receive(channel)
    if request is None:
        return
    try:
        _become(request["outer"])
        if request["op"] == "exec":
            execute(request, channel, lifeline, tty)
        else:
            wire.send(channel, _files(request))
    except OSError as error:
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
