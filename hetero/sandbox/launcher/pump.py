"""The wait for a command: moves its output, feeds its input, keeps its deadline, obeys its owner."""

from __future__ import annotations

import os
import select
import time

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.meter import Meter
from hetero.sandbox.launcher.output import Kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CHUNK, _BACKLOG = 1 << 16, 1 << 20


class Pump:
    """Ends when the main process has ended or a limit has been passed; never waits for pipes to close.

    Attributes:
        reason: why the command has to be killed: "timeout", "memory", "cpu", "disk", "output", "killed",
            "closed"; "" if it ended by itself.
    """

    def __init__(
        self,
        request: dict[str, Any],
        channel: int,
        lifeline: int,
        main: int,
        ours: dict[str, int],
        upper: int,
    ) -> None:
        self.reason = ""
        self.exec_started = self.frozen_s = 0.0
        self.kept = {name: Kept(request["out_keep"]) for name in ("stdout", "stderr")}
        self.meter = Meter(request["sums"], upper)
        self._channel, self._lifeline, self._main, self._ours = channel, lifeline, main, dict(ours)
        self._timeout, self._out_kill = request["timeout"], request["out_kill"]
        self._stream, self._weaken = request["stream"], request["weaken"]
        self._frozen_at: float | None = None
        self._input = bytearray()
        self._input_ended = True
        self._outgoing = bytearray()
        self._frames = wire.Splitter()
        self._owner_listens = True
        for handle in ours.values():
            os.set_blocking(handle, False)

    def run(self, given: bytes | None, freeze: Callable[[int], None]) -> None:
        """Go on until the command has ended or must be killed."""
        self._freeze = freeze
        if given is not None:
            self._input += given
            self._input_ended = not self._stream
        self._feed()
        while not self.reason:
            if self._wait() or self._late():
                return

    def _late(self) -> bool:
        if self.reason or self._frozen_at is not None:
            return False
        now = time.monotonic()
        if self._timeout is not None and now - self.exec_started - self.frozen_s > self._timeout:
            self.reason = "timeout"
        elif "meter" not in self._weaken:
            self.reason = self.meter.check(now)
        return bool(self.reason)

    def _wait(self) -> bool:
        """One round; whether the main process has ended."""
        poll = select.poll()
        poll.register(self._main, select.POLLIN)
        poll.register(self._lifeline, 0)
        if self._owner_listens:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        for name, handle in self._ours.items():
            if name == "stdin":
                if self._input:
                    poll.register(handle, select.POLLOUT)
            elif len(self._outgoing) < _BACKLOG:
                poll.register(handle, select.POLLIN)
        ready = dict(poll.poll(self._pause()))
        if self._lifeline in ready:
            self.reason = "closed"
        for name in ("stdout", "stderr"):
            if self._ours.get(name, -1) in ready:
                self._read(name)
        if self._ours.get("stdin", -1) in ready:
            self._feed()
        if self._channel in ready:
            self._talk(ready[self._channel])
        waits_for_pipes = "eof" in self._weaken and ("stdout" in self._ours or "stderr" in self._ours)
        return self._main in ready and not waits_for_pipes

    def _pause(self) -> int:
        if self._frozen_at is not None:
            return 1000
        now = time.monotonic()
        until = self.meter.next
        if self._timeout is not None:
            until = min(until, self.exec_started + self.frozen_s + self._timeout)
        return max(int((until - now) * 1000) + 1, 1)

    def _read(self, name: str) -> bool:
        """Whether more may be there."""
        try:
            data = os.read(self._ours[name], _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            os.close(self._ours.pop(name))
            return False
        self.kept[name].add(data)
        if self._stream and self._owner_listens:
            self._outgoing += wire.pack({name: data})
            self._push()
        if "output" not in self._weaken and sum(kept.total for kept in self.kept.values()) > self._out_kill:
            self.reason = self.reason or "output"
            return False
        return True

    def drain(self) -> None:
        """Read what the pipes hold at this moment, up to a pipe's worth; nobody is waited for."""
        for name in ("stdout", "stderr"):
            for _ in range(32):
                if name not in self._ours or not self._read(name):
                    break
        if self._owner_listens:
            os.set_blocking(self._channel, True)
            while self._outgoing:
                try:
                    del self._outgoing[: os.write(self._channel, self._outgoing)]
                except OSError:
                    self._owner_listens = False
                    self._outgoing.clear()

    def _feed(self) -> None:
        handle = self._ours.get("stdin")
        if handle is None:
            return
        try:
            while self._input:
                del self._input[: os.write(handle, self._input[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:
            self._input.clear()
            self._input_ended = True
        if self._input_ended:
            os.close(self._ours.pop("stdin"))

    def _push(self) -> None:
        os.set_blocking(self._channel, False)
        try:
            del self._outgoing[: os.write(self._channel, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._owner_listens = False
        os.set_blocking(self._channel, True)

    def _talk(self, events: int) -> None:
        if self._outgoing and events & select.POLLOUT:
            self._push()
        if not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return
        try:
            data = os.read(self._channel, _CHUNK)
        except OSError:
            data = b""
        if not data:
            self._owner_listens = False
            self.reason = self.reason or "killed"
            return
        for message in self._frames.feed(data):
            self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["op"]
        if kind == "kill":
            self.reason = self.reason or "killed"
        elif kind == "stdin":
            self._input += message["data"]
            self._input_ended = message["end"]
            self._feed()
        elif kind == "freeze" and self._frozen_at is None:
            self._freeze(k.SIGSTOP)
            self._frozen_at = time.monotonic()
        elif kind == "thaw" and self._frozen_at is not None:
            self.frozen_s += time.monotonic() - self._frozen_at
            self._frozen_at = None
            self._freeze(k.SIGCONT)
        if kind in ("freeze", "thaw"):
            self._outgoing += wire.pack({"state": kind})
            self._push()
