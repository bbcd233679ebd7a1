"""The launcher's loop: takes requests, forks a process for each, remembers boxes, and takes all down at the
end.

It does nothing slow itself. It ends when its owner does (pidfd) or lets go of the control socket; every box
hangs on a pipe whose other end only the launcher has, so whatever way it goes, the boxes go with it.
"""

from __future__ import annotations

import _signal
import _socket
import marshal
import os
import select
import struct
import time

from hetero.sandbox.launcher import box as boxes
from hetero.sandbox.launcher import brand, tree, wire
from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher.groups import Groups, Seat
from hetero.sandbox.launcher.templates import Templates
from hetero.sandbox.launcher.workers import Workers, in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LARGEST = 1 << 16
_GRACE_S = 5.0
_LULL_MS = 3
"""A worker is made ahead of its request when nothing else has come for so long."""


class Box:
    """What the launcher knows of one box."""

    def __init__(self, pid: int, handle: int, lifeline: tuple[int, int], seat: Seat) -> None:
        self.pid, self.handle, self.lifeline, self.seat = pid, handle, lifeline, seat
        self.members = {pid}
        self.closing = False
        self.closing_since = 0.0
        self.waiters: list[int] = []


class Launcher:
    """State of the loop.

    Args:
        control: SOCK_SEQPACKET socket of the owner.
        owner: pidfd of the owner's process.
        settings: run (directory to remove at the end), outer (host uid and gid of boxes), groups (a name),
            cgroups (where control groups are mounted).
    """

    def __init__(self, control: _socket.socket, owner: int, settings: dict[str, Any]) -> None:
        self.control, self.owner, self.settings = control, owner, settings
        self.boxes: dict[str, Box] = {}
        self.where: dict[int, str] = {}
        self.groups = Groups(settings["groups"], settings["cgroups"], settings["outer"])
        self.templates = Templates()
        self.workers = Workers()
        self.wake, self._woken = os.pipe()
        for handle in (self.wake, self._woken):
            os.set_blocking(handle, False)
        _signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_IGN)  # a Ctrl-C for the owner is the owner's to handle

    def run(self) -> None:
        """Serve until the owner is gone."""
        self._keep_low_numbers()
        poll = select.poll()
        for handle in (self.control.fileno(), self.owner, self.wake):
            poll.register(handle, select.POLLIN)
        while True:
            closing = any(known.closing for known in self.boxes.values())
            pause = 50 if closing else None
            ready = {handle for handle, _ in poll.poll(pause if self.workers.ready else _LULL_MS)}
            if not ready:
                self.workers.prepare()
            if self.wake in ready:
                os.read(self.wake, 4096)
            self._reap()
            if self.owner in ready or (self.control.fileno() in ready and not self._take()):
                return

    def _keep_low_numbers(self) -> None:
        """Occupy the number that every box's first process gives to its upper layer."""
        while (handle := os.open("/dev/null", os.O_RDONLY)) <= boxes.UPPER:
            pass
        os.close(handle)

    def _take(self) -> bool:
        """Handle one request; False when the owner has closed the socket."""
        data, ancillary, _, _ = self.control.recvmsg(_LARGEST, _socket.CMSG_SPACE(4 * 8))
        handles: list[int] = []
        for _, _, payload in ancillary:
            handles += [h for (h,) in struct.iter_unpack("i", payload[: len(payload) // 4 * 4])]
        if not data:
            return False
        operation, name, details = marshal.loads(data)
        try:
            getattr(self, "_do_" + operation)(name, details, handles)
        except OSError as error:
            self._reply(handles[0], {"error": str(error), "errno": error.errno or 5, "what": operation})
        for handle in handles:
            os.close(handle)
        return True

    def _reply(self, channel: int, message: dict[str, Any]) -> None:
        try:  # noqa: SIM105 (contextlib is large)
            wire.send(channel, message)
        except OSError:
            pass

    def _do_create(self, name: str, details: dict[str, Any], handles: list[int]) -> None:
        if name in self.boxes:
            raise OSError(17, f"there is a box {name} already")
        seat = self.groups.make(name, details)
        lifeline = os.pipe()
        mapped, release = os.pipe()
        channel = handles[0]
        pid, handle = k.clone(boxes.namespaces(details["weaken"]))
        if pid == 0:
            in_child(lambda: boxes.live(wire.receive(channel), channel, mapped, lifeline[0]))
        os.close(mapped)
        known = self.boxes[name] = Box(pid, handle, lifeline, seat)
        self.where[pid] = name
        try:
            boxes.map_user(pid, details["uid"], self.settings["outer"])
            os.write(release, b"m")
        finally:
            os.close(release)
        del known

    def _do_work(self, name: str, details: dict[str, Any], handles: list[int]) -> None:
        known = self.boxes.get(name)
        if known is None or known.closing:
            raise OSError(3, f"box {name} is closed")
        warm = self.templates.line(details["warm"]).fileno() if details.get("warm") else -1
        channel, tty = handles[0], handles[1] if len(handles) > 1 else -1
        own = channel, known.handle, known.lifeline[0]
        pid = self.workers.work(known.pid, own, known.seat, tty, warm)
        known.members.add(pid)
        self.where[pid] = name

    def _do_warm(self, name: str, details: dict[str, Any], handles: list[int]) -> None:
        self.templates.start(name, details, handles[0])

    def _do_close(self, name: str, details: dict[str, Any], handles: list[int]) -> None:
        known = self.boxes.get(name)
        if known is None:
            self._reply(handles[0], {"ok": True, "oom_kills": 0})
            return
        known.waiters.append(os.dup(handles[0]))
        if not known.closing:
            known.closing, known.closing_since = True, time.monotonic()
            os.close(known.lifeline[1])

    def _do_oom(self, name: str, details: dict[str, Any], handles: list[int]) -> None:
        self._reply(handles[0], {"ok": self.groups.oom_kills(name)})

    def _do_state(self, name: str, details: dict[str, Any], handles: list[int]) -> None:
        state = {box: known.pid for box, known in self.boxes.items()}
        self._reply(handles[0], {"ok": {"boxes": state, "groups": sorted(self.groups.parents)}})

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            self.templates.ended(pid)
            self.workers.ended(pid)
            name = self.where.pop(pid, None)
            if name is not None and name in self.boxes:
                known = self.boxes[name]
                known.members.discard(pid)
                if pid == known.pid and not known.closing:
                    known.closing, known.closing_since = True, time.monotonic()
                    os.close(known.lifeline[1])
        for name, known in list(self.boxes.items()):
            if known.closing:
                self._finish(name, known)

    def _finish(self, name: str, known: Box) -> None:
        if known.members:
            if time.monotonic() - known.closing_since > _GRACE_S:
                for pid in known.members:
                    os.kill(pid, k.SIGKILL)
            return
        kills = self.groups.oom_kills(name)
        if not self.groups.remove(name):
            if time.monotonic() - known.closing_since > _GRACE_S:
                self.groups.kill(name)
            return
        for handle in (known.handle, known.lifeline[0], *known.seat.handles()):
            os.close(handle)
        del self.boxes[name]
        for waiter in known.waiters:
            self._reply(waiter, {"ok": True, "oom_kills": kills})
            os.close(waiter)

    def take_down(self) -> None:
        """Close every box, wait, and remove the run's directory and control groups."""
        for known in self.boxes.values():
            if not known.closing:
                known.closing, known.closing_since = True, time.monotonic()
                os.close(known.lifeline[1])
        until = time.monotonic() + 2 * _GRACE_S
        while self.boxes and time.monotonic() < until:
            self._reap()
            time.sleep(0.002)
        self.workers.close()
        self.groups.close()
        brand.end_below(self.settings["run"])  # boxes of other tiers; else nobody would know of them
        tree.remove(self.settings["run"])
        tree.remove(self.settings["run"] + ".lock")
