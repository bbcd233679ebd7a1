"""Warm interpreters: processes that have imported what boxes will need, and fork into a box when asked.

The launcher starts them and hands them commands; a worker that hands one over stays until it has ended, so
that the box's account of its processes holds.
"""

from __future__ import annotations

import _socket
import marshal
import os
import struct

from hetero.sandbox.launcher import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Threads of a library would keep the interpreter from entering a box's namespaces."""


class Templates:
    """The warm interpreters of one launcher, by key."""

    def __init__(self) -> None:
        self._lines: dict[str, _socket.socket] = {}
        self._keys: dict[int, str] = {}

    def start(self, key: str, details: dict[str, Any], reply: int) -> None:
        """Start one; it answers on `reply` when it is ready. One that is there is replaced."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        pid, handle = k.clone(0)
        if pid == 0:
            _become(details, theirs.fileno(), reply)
        os.close(handle)
        theirs.close()
        if key in self._lines:
            self._lines.pop(key).close()
        self._lines[key], self._keys[pid] = ours, key

    def line(self, key: str) -> _socket.socket:
        """The socket of one. Raises OSError."""
        if key not in self._lines:
            raise OSError(3, "the template's interpreter has ended")
        return self._lines[key]

    def ended(self, pid: int) -> None:
        """Forget a process, if it is one of these."""
        key = self._keys.pop(pid, None)
        if key is not None and key not in self._keys.values():
            self._lines.pop(key).close()


def hand_over(line: _socket.socket, request: dict[str, Any], first: int, handles: list[int]) -> None:
    """Let a warm interpreter serve the request of a command, and wait until it has.

    Args:
        first: pid of the box's first process.
        handles: channel, pidfd of the first process, lifeline, then those of the box's control groups.
    """
    ended, done = os.pipe()
    message = marshal.dumps((request, first), 4)
    numbers = [*handles, done]
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(numbers)}i", *numbers))]
    line.sendmsg([message], ancillary)
    for handle in numbers:
        if handle != numbers[2]:
            os.close(handle)
    os.read(ended, 1)


def _become(details: dict[str, Any], line: int, reply: int) -> None:
    """In the new process: become the interpreter."""
    try:
        k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
        k.close_all_but((0, 1, 2, line, reply))
        for handle in (line, reply):
            os.set_inheritable(handle, True)
        argv = [details["python"], "-I", "-c", details["code"], str(line), str(reply), *details["imports"]]
        os.execve(argv[0], argv, _ENVIRONMENT)
    except OSError as error:
        os.write(2, f"sandbox template: {error}\n".encode())
    os._exit(127)
