"""Processes that serve one request each.

One is always ready before it is asked for: it is forked while nobody waits, holds nothing of any box, and is
handed what its request needs.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
import struct

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.execute import execute
from hetero.sandbox.launcher.files import serve_files
from hetero.sandbox.launcher.groups import Seat
from hetero.sandbox.launcher.listen import listen
from hetero.sandbox.launcher.templates import hand_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_LARGEST, _MOST_HANDLES, _TRIES = 4096, 16, 3


class Workers:
    """The launcher's end."""

    def __init__(self) -> None:
        self.ready = False

    def prepare(self) -> None:
        """Make one, if none is ready."""
        if self.ready:
            return
        self._line, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._pid, handle = k.clone(0)
        if self._pid == 0:
            in_child(lambda: _wait(theirs.fileno()))
        os.close(handle)
        theirs.close()
        self.ready = True

    def work(self, first: int, box: tuple[int, int, int], seat: Seat, tty: int, warm: int) -> int:
        """Let a worker answer the request that comes on a channel; its pid.

        Args:
            first: pid of the box's first process.
            box: the channel, pidfd of that process, the end of the lifeline that tells of the box's end.
            tty: a terminal, or -1.
            warm: socket of a warm interpreter that is to be the command, or -1.
        """
        optional = [handle for handle in (tty, warm) if handle >= 0]
        handles = [*box, *optional, *seat.handles()]
        message = marshal.dumps((first, tty >= 0, warm >= 0, seat.birth >= 0))
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(handles)}i", *handles))]
        for _ in range(_TRIES):
            self.prepare()
            self.ready = False
            try:
                self._line.sendmsg([message], ancillary)
                return self._pid
            except ConnectionError:  # somebody has killed it while it waited
                continue
            finally:
                self._line.close()
        raise OSError(5, "workers are killed while they wait")

    def ended(self, pid: int) -> None:
        """Forget the one that is ready, if it was this process: somebody has killed it."""
        if self.ready and pid == self._pid:
            self.ready = False
            self._line.close()

    def close(self) -> None:
        """End the one that is ready, and wait for it."""
        if self.ready:
            self.ready = False
            self._line.close()
            os.waitpid(self._pid, 0)


def in_child(body: Callable[[], None]) -> NoReturn:
    """Run `body` in a forked child and end it, whatever happens."""
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        body()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"sandbox worker: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(70)


def _wait(line: int) -> None:
    """Body of a worker; returns when it has answered, or when the launcher is gone."""
    k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
    k.close_all_but((0, 1, 2, line))
    waiting = _socket.socket(fileno=line)
    data, ancillary, _, _ = waiting.recvmsg(_LARGEST, _socket.CMSG_SPACE(4 * _MOST_HANDLES))
    if not data:
        return
    waiting.close()
    handles = [h for _, _, payload in ancillary for (h,) in struct.iter_unpack("i", payload)]
    first, with_terminal, with_template, born = marshal.loads(data)
    channel, box, lifeline, *rest = handles
    tty = rest.pop(0) if with_terminal else -1
    warm = rest.pop(0) if with_template else -1
    request = wire.receive(channel)
    if request is None:
        return
    try:
        if warm >= 0:
            own = [channel, box, lifeline, *rest]
            hand_over(_socket.socket(fileno=warm), {**request, "born_in_group": born}, first, own)
        elif request["op"] == "listen":
            listen(request, channel, (first, box))
        elif request["op"] == "exec":
            seat = Seat(rest[0], tuple(rest[1:])) if born else Seat(-1, tuple(rest))
            execute(request, channel, (first, box), lifeline, seat, tty)
        else:
            serve_files(request, channel, (first, box))
    except OSError as error:
        wire.send(channel, {"error": str(error), "errno": error.errno or 5, "what": request["op"]})
