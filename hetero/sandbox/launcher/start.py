"""Entry of the launcher's process."""

from __future__ import annotations

import _socket
import ctypes
import gc
import marshal
import os
import resource
import sys

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher.serve import Launcher


def hide_arguments(shown: bytes) -> None:
    """Overwrite this process's command line: every box's first process shows it as its own."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    for start, end in ((int(fields[45]), int(fields[46])), (int(fields[47]), int(fields[48]))):
        if end > start:
            ctypes.memset(start, 0, end - start)
    name = ctypes.create_string_buffer(shown)
    k.prctl(k.PR_SET_NAME, ctypes.addressof(name))


def main() -> None:
    """Entry point: argv holds the control socket's number, the owner's pid and marshalled settings in hex."""
    settings = marshal.loads(bytes.fromhex(sys.argv[3]))
    control = _socket.socket(fileno=int(sys.argv[1]))
    owner = k.pidfd_open(int(sys.argv[2]))
    if os.getppid() != int(sys.argv[2]):
        return
    if "argv" not in settings["weaken"]:
        hide_arguments(b"sandbox-init")
    k.prctl(k.PR_SET_CHILD_SUBREAPER, 1)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    launcher = Launcher(control, owner, settings)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        launcher.run()
    finally:
        launcher.take_down()
