"""One command of a remote box: turns the service's stream into the frames that a local worker would send."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import threading
import time
from typing import Any

from hetero.sandbox.errors import SandboxError
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.output import Kept
from hetero.sandbox.tiers.service import Agent, Refused

_START, _SIGNAL, _INPUT = "process.Process/Start", "process.Process/SendSignal", "process.Process/SendInput"
_NO_PROGRAM = ("not found", "no such file", "permission denied")


class RemoteCommand:
    """Runs in threads of the owner: one reads the stream, one keeps the deadline and obeys the owner.

    What it cannot do: the deadline kills the command's main process only; CPU time and memory are not told.
    """

    def __init__(self, agent: Agent, request: dict[str, Any], channel: socket.socket) -> None:
        self._agent, self._request, self._channel = agent, request, channel
        self._kept = {name: Kept(request["out_keep"]) for name in ("stdout", "stderr")}
        self._reason, self._pid, self._started = "", 0, time.monotonic()
        self._begun, self._ended, self._sending = threading.Event(), threading.Event(), threading.Lock()

    def run(self) -> None:
        """Body of the reading thread: the last frame is the result, or an error of the service."""
        control = threading.Thread(target=self._control, name="sandbox-remote-control", daemon=True)
        control.start()
        try:
            last = self._read()
        except SandboxError as error:
            last = {"error": str(error), "errno": 5}
        self._ended.set()
        self._begun.set()
        self._send(last)
        control.join()
        self._channel.close()

    def _read(self) -> dict[str, Any]:
        request = self._request
        argv = request["argv"]
        process = {"cmd": argv[0], "args": argv[1:], "envs": request["env"], "cwd": request["cwd"]}
        try:
            for message in self._agent.stream(
                _START, {"process": process, "stdin": request["stdin"] is not None}
            ):
                event = message.get("event", {})
                if "start" in event:
                    self._pid = int(event["start"]["pid"])
                    self._begun.set()
                elif "data" in event:
                    self._take(event["data"])
                elif "end" in event:
                    return self._result(event["end"], "", 0)
        except Refused as error:
            words = str(error).lower()
            if self._pid or not any(each in words for each in _NO_PROGRAM):
                raise
            return self._result({"exitCode": 127}, str(error), 2 if "permission" not in words else 13)
        return {"error": "the service's answer has no end", "errno": 5}

    def _take(self, data: dict[str, str]) -> None:
        for name, kept in self._kept.items():
            if name in data:
                content = base64.b64decode(data[name])
                kept.add(content)
                if self._request["stream"]:
                    self._send({name: content})
        if sum(kept.total for kept in self._kept.values()) > self._request["out_kill"]:
            self._kill("output")

    def _result(self, end: dict[str, Any], failure: str, errno: int) -> dict[str, Any]:
        now = time.monotonic()
        signalled = str(end.get("status", "")).startswith("signal") or self._reason
        return {
            "exit": None if signalled else int(end.get("exitCode", 0)),
            "signal": 9 if signalled else None,
            "reason": self._reason,
            "failure": failure,
            "errno": errno,
            **{name: kept.value() for name, kept in self._kept.items()},
            "bytes_out": sum(kept.total for kept in self._kept.values()),
            "truncated": any(kept.truncated for kept in self._kept.values()),
            "wall_s": now - self._started,
            "start_s": 0.0,
            "cpu_s": 0.0,
            "max_rss": 0,
        }

    def _control(self) -> None:
        if not self._begun.wait(60) or self._ended.is_set():
            return
        timeout = self._request["timeout"]
        if self._request["stdin"]:
            self._feed(self._request["stdin"], end=not self._request["stream"])
        elif self._request["stdin"] is not None and not self._request["stream"]:
            self._feed(b"", end=True)
        frames = wire.Splitter()
        while not self._ended.is_set():
            ready, _, _ = select.select([self._channel], [], [], 0.05)
            if timeout is not None and time.monotonic() - self._started > timeout:
                self._kill("timeout")
                return
            if ready:
                data = self._channel.recv(1 << 16)
                if not data:
                    self._kill("killed")
                    return
                for message in frames.feed(data):
                    if message["op"] == "kill":
                        self._kill("killed")
                    elif message["op"] == "stdin":
                        self._feed(message["data"], message["end"])

    def _feed(self, data: bytes, end: bool) -> None:
        chosen = {"process": {"pid": self._pid}}
        with contextlib.suppress(SandboxError):  # the command has ended, and its result says how
            if data:
                self._agent.ask(_INPUT, {**chosen, "input": {"stdin": base64.b64encode(data).decode()}})
            if end:
                self._agent.ask("process.Process/CloseStdin", chosen)

    def _kill(self, reason: str) -> None:
        if self._reason:
            return
        self._reason = reason
        with contextlib.suppress(SandboxError):  # the same
            self._agent.ask(_SIGNAL, {"process": {"pid": self._pid}, "signal": "SIGNAL_SIGKILL"})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):  # nobody listens any more
            self._channel.sendall(wire.pack(message))
