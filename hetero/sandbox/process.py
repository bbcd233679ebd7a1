"""A command that is running in a box."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hetero.sandbox.client import receive
from hetero.sandbox.errors import SandboxDead, SandboxError, SandboxInfraError
from hetero.sandbox.launcher import wire
from hetero.sandbox.result import Result

_FREEZE_S = 10.0
_SLACK_S = 60.0


class Ends(Protocol):
    """Something that ends."""

    def poll(self) -> int | None:
        """None while it goes on."""


class Host(Protocol):
    """What serves commands: the launcher, or a runner."""

    @property
    def process(self) -> Ends:
        """Its process."""

    def gone(self) -> SandboxDead:
        """The error that says that it has ended."""

    def log(self) -> str:
        """Its last words."""


class Process:
    """A running command. Any thread may call any method; iterate in one.

    Args:
        finished: called once with the last frame (None if there is none); makes the result.
        timeout: the command's own deadline, seconds; a worker that is silent for a minute longer has failed.
    """

    def __init__(
        self,
        channel: socket.socket,
        host: Host,
        finished: Callable[[Process, dict[str, Any] | None], Result | None],
        timeout: float | None,
    ) -> None:
        self._channel, self._host, self._finished = channel, host, finished
        self._state = threading.Condition()
        self._frozen: str = "thaw"
        self._output: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._result: Result | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        channel.settimeout(None if timeout is None else timeout + _SLACK_S)

    def collect(self) -> None:
        """Read to the end. Runs in the caller of `exec`, or in a thread of its own for a background
        command."""
        frame: dict[str, Any] | None = None
        error: Exception | None = None
        try:
            frame, error = self._read()
        except SandboxInfraError as failed:
            error = failed
        self._channel.close()
        try:
            self._result = self._finished(self, frame)
        except Exception as failed:
            error = error or failed
        self._error = error
        self._done.set()
        with self._state:
            self._state.notify_all()
        self._output.put(None)

    def _read(self) -> tuple[dict[str, Any] | None, SandboxError | None]:
        while True:
            try:
                frame = receive(self._channel)
            except SandboxInfraError:
                if self._frozen == "freeze":
                    continue
                raise
            if frame is None:
                if self._host.process.poll() is not None:
                    return None, self._host.gone()
                return None, SandboxDead(f"The command's worker is gone.{self._host.log()}")
            if "state" in frame:
                with self._state:
                    self._frozen = frame["state"]
                    self._state.notify_all()
            elif "error" in frame:
                kind = SandboxDead if frame["errno"] == 3 else SandboxInfraError
                return None, kind(f"The command could not be started: {frame['error']}.")
            elif "wall_s" in frame:
                return frame, None
            else:
                for name in ("stdout", "stderr"):
                    if name in frame:
                        self._output.put((name, frame[name]))

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """("stdout" | "stderr", bytes) as they come, until the command has ended."""
        while (item := self._output.get()) is not None:
            yield item
        self._output.put(None)

    def read(self, timeout: float | None) -> tuple[str, bytes] | None:
        """The next piece of output; None when the command has ended, or has said nothing for `timeout`
        seconds."""
        try:
            item = self._output.get(timeout=timeout)
        except queue.Empty:
            return None
        if item is None:
            self._output.put(None)
        return item

    def wait(self) -> Result:
        """The result, once the command has ended. Raises SandboxInfraError or SandboxDead without one."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._done.is_set()

    def write(self, data: bytes, end: bool = False) -> None:
        """Feed its standard input; `end` closes it."""
        self._send({"op": "stdin", "data": data, "end": end})

    def kill(self) -> None:
        """Kill it and all that it started."""
        self._send({"op": "kill"})

    def set_frozen(self, state: str) -> None:
        """Stop ("freeze") or continue ("thaw") all its processes, and wait until they are."""
        self._send({"op": state})
        with self._state:
            if not self._state.wait_for(lambda: self._frozen == state or self._done.is_set(), _FREEZE_S):
                raise SandboxInfraError(f"A command did not {state} in {_FREEZE_S} s.")

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(wire.pack(message))
