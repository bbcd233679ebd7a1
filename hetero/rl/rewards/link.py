"""The trainer's connection to the reward supervisor: starts it, and starts it again if somebody killed it."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from hetero.errors import RewardError
from hetero.rl.rewards.wire import Inbox, frame

_LAUNCH = Path(__file__).with_name("launch.py")
_MAX_RESTARTS = 3
_log = logging.getLogger(__name__)


class Link:
    """Sends jobs to a supervisor process and receives their results. No thread, and nothing of this process
    is forked.

    Attributes:
        functions: what the workers found out about each function.
        waiting: number of every job without a result -> (function, body).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = json.dumps(config).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_restarts = 0
        self.waiting: dict[int, tuple[int, bytes]] = {}
        self.functions: list[dict[str, Any]] = []
        self._start()

    def send(self, number: int, function: int, body: bytes) -> None:
        """Hand over a job. Its result comes from `receive` some time later."""
        self.waiting[number] = (function, body)
        self._write(frame({"id": number, "function": function}, body))

    def receive(self, timeout: float) -> list[dict[str, Any]]:
        """The results that arrive within `timeout` seconds, as soon as there is one."""
        if not select.select([self._inbox.fd], [], [], timeout)[0]:
            return []
        results = []
        for header, _ in self._inbox.receive():
            if header["kind"] == "ready":
                self._meet(header)
            elif self.waiting.pop(header["id"], None) is not None:
                results.append(header)
        if not self._inbox.open:
            self._restart()
        return results

    def await_functions(self) -> None:
        """Wait until the functions are loaded. Raises RewardError when one cannot be."""
        while not self.functions:
            self.receive(1.0)

    def close(self) -> None:
        """End the supervisor, and with it the workers and whatever they started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self) -> None:
        # Unbuffered: what is written is sent, and closing has nothing left to send to a process that is gone.
        self._process = subprocess.Popen(
            [sys.executable, str(_LAUNCH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the trainer, which then ends its children in order
        )
        assert self._process.stdout is not None
        self._inbox = Inbox(self._process.stdout.fileno())
        self._write(frame({}, self._config))

    def _write(self, message: bytes) -> None:
        if self._process is None:
            raise RewardError("This reward pool is closed.")
        assert self._process.stdin is not None
        left = memoryview(message)
        try:
            while left:
                left = left[os.write(self._process.stdin.fileno(), left) :]
        except BrokenPipeError:
            self._restart()

    def _restart(self) -> None:
        process = self._process
        self.close()
        code = process.returncode if process is not None else None
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            raise RewardError(
                f"The process that watches over the reward workers ended {self._num_restarts} times (last "
                f"exit code {code}). "
                "If it was killed for want of memory, lower the number of workers or what the reward "
                "functions hold."
            )
        _log.warning("the reward supervisor ended (exit code %s); starting it anew", code)
        self._start()
        for number, (function, body) in list(self.waiting.items()):
            self.send(number, function, body)

    def _meet(self, header: dict[str, Any]) -> None:
        """Learn what the functions are, or that they cannot be used."""
        if header["functions"] is None:
            raise RewardError(f"The reward functions cannot be loaded: {header['message']}.")
        for function in header["functions"]:
            if function["error"]:
                raise RewardError(f"A reward function cannot be loaded: {function['error']}")
        self.functions = header["functions"]
