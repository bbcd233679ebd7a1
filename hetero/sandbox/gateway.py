"""The owner's end of the proxy: starts it, lends it the boxes' sockets, decides and writes the journal."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from hetero.sandbox.client import boot_code
from hetero.sandbox.companion import Companion
from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.journal import net_decision
from hetero.sandbox.network import Network
from hetero.sandbox.policy import Policy
from hetero.sandbox.store import outer_ids

_LARGEST = 1 << 16
Log = Callable[..., None]


class Gateway:
    """One proxy process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._boxes: dict[str, tuple[Policy, Log]] = {}
        self._lock = threading.Lock()
        uid, gid = outer_ids()
        code = boot_code("hetero.sandbox.proxy.serve")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code, str(theirs.fileno()), str(uid), str(gid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                pass_fds=(theirs.fileno(),),
            )
        threading.Thread(target=self._answer, name="sandbox-gateway", daemon=True).start()

    def add(self, box: str, policy: Policy, log: Log, listener: int) -> None:
        """Serve the connections of a box that come in on `listener`, which is closed here."""
        network = policy.network
        assert network is not None
        with self._lock:
            self._boxes[box] = (policy, log)
        try:
            self._send({"op": "add", "box": box, "client": _client(network)}, [listener])
        finally:
            os.close(listener)

    def remove(self, box: str) -> None:
        """Cut a box off. One that is not known does no harm."""
        with self._lock:
            known = box in self._boxes
        if known:
            with contextlib.suppress(SandboxInfraError):  # gone, and the box's way out with it
                self._send({"op": "remove", "box": box})

    def _send(self, message: dict[str, Any], handles: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], handles or [])
        except OSError as error:
            raise SandboxInfraError(f"The sandbox proxy has ended: {error}.") from error

    def _answer(self) -> None:
        """Body of the thread: every question gets its line in the journal first, then its answer."""
        while True:
            try:
                data = self._control.recv(_LARGEST)
            except OSError:
                return
            if not data:
                return
            told = json.loads(data)
            number, box = told.pop("id"), told.pop("box")
            if told["event"] == "removed":  # every connection has its last line
                with self._lock:
                    self._boxes.pop(box, None)
                continue
            verdict = "deny"
            with self._lock:
                known = self._boxes.get(box)
            if known is not None:
                with contextlib.suppress(SandboxInfraError):  # what cannot be written down does not happen
                    verdict = net_decision(known[0], box, told, known[1])
            with contextlib.suppress(SandboxInfraError):
                self._send({"op": "answer", "id": number, "verdict": verdict})

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._control.close()


def _client(network: Network) -> dict[str, Any]:
    return {
        "rules": [(rule.host, list(rule.ports)) for rule in network.allow],
        "max_bytes": network.max_bytes,
        "max_connections": network.max_connections,
        "private": network.private,
    }


_own = Companion(Gateway)


def gateway() -> Gateway:
    """This process's gateway, started at the first call."""
    return _own.get()


def stop() -> None:
    """End this process's proxy."""
    _own.stop()
