"""What a box is: its identity, its layers, its state, and its line to the launcher and the journal."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from hetero.sandbox import isolation
from hetero.sandbox.audit import shortened
from hetero.sandbox.client import REPLY_S
from hetero.sandbox.context import Context
from hetero.sandbox.errors import SandboxDead, SandboxInfraError
from hetero.sandbox.gateway import gateway
from hetero.sandbox.image import Image, skeleton
from hetero.sandbox.isolation import Report
from hetero.sandbox.network import PORT
from hetero.sandbox.policy import Policy
from hetero.sandbox.process import Host, Process
from hetero.sandbox.request import box_spec, group_limits
from hetero.sandbox.template import Template

State = Literal["live", "frozen", "hibernated", "closed"]


class BoxState:
    """Base of the parts of Sandbox. Methods with one underscore are what a tier replaces."""

    tier: ClassVar[isolation.Tier] = "ns"

    def __init__(
        self,
        shared: Context,
        image: Image,
        layers: tuple[str, ...],
        policy: Policy,
        labels: Mapping[str, str],
        weaken: tuple[str, ...],
        parent: str = "",
    ) -> None:
        self.id = secrets.token_hex(6)
        self.parent, self.policy, self.image, self.labels = parent, policy, image, dict(labels)
        self._shared, self._layers, self._weaken = shared, layers, weaken
        self._running: set[Process] = set()
        self._lock, self._python_lock = threading.RLock(), threading.Lock()
        self.template: Template | None = None
        self._state: State = "closed"
        self._directory: Path | None = None
        self._isolation: isolation.Report | None = None

    @property
    def isolation(self) -> Report:
        """The tier, and which limits are hard."""
        if self._isolation is None:
            self._isolation = self._report()
        return self._isolation

    def _report(self) -> Report:
        return isolation.report(self._shared.controllers(), self.policy.limits.disk_hard, self._weaken)

    def inner_path(self, path: str) -> str:
        """What commands in the box call `path`: the same, in a tier with a root of its own."""
        return path

    @property
    def state(self) -> str:
        """ "live", "frozen", "hibernated" or "closed"."""
        return self._state

    def _ask(self, operation: str, details: Any, frame: Any = None) -> Any:
        return self._shared.launcher.ask(operation, self.id, details, frame)

    def _open(
        self, request: dict[str, Any], files: tuple[int, ...], warm: str = ""
    ) -> tuple[socket.socket, Host]:
        """Start a command: the channel on which its worker answers, and what tells whether that lives."""
        launcher = self._shared.launcher
        return launcher.open("work", self.id, {"warm": warm}, request, files), launcher

    def _code_for_journal(self, code: str) -> dict[str, Any]:
        return shortened(["python3", "-c", code])

    def _work(self, request: dict[str, Any]) -> Any:
        """Do a file operation; the worker's answer."""
        return self._ask("work", {}, request)

    def _oom_kills(self) -> int:
        """How often something in the box was killed for memory."""
        return int(self._ask("oom", {})["ok"])

    def _log(self, event: str, **fields: Any) -> None:
        lineage = {"parent": self.parent} if self.parent else {}
        weakened = {"weakened": list(self._weaken)} if self._weaken else {}
        labels = {"labels": self.labels} if event == "create" and self.labels else {}
        self._shared.audit.write(sandbox=self.id, event=event, **lineage, **weakened, **labels, **fields)

    def _need(self, *states: str) -> None:
        if self._state not in states:
            raise SandboxDead(f"Sandbox {self.id} is {self._state}; this needs it {' or '.join(states)}.")

    def _start(self, min_isolation: str = "") -> None:
        """Make the box's processes over its layers and an empty upper one.

        `min_isolation`: what a new box needs; one that comes from another has what that has.
        """
        shared, policy = self._shared, self.policy
        run = shared.launcher.run
        if self._isolation is None:
            isolation.require(min_isolation or self.tier, self.isolation)
        lowest = skeleton(run, self.image, (*policy.writable, *policy.readable), policy.uid)
        self._directory = run.new_directory("boxes", f"{self.id}-{secrets.token_hex(3)}")
        spec = box_spec(
            str(self._directory),
            (*self._layers, lowest),
            self.image,
            policy,
            self._weaken,
        )
        reply = shared.launcher.ask("create", self.id, group_limits(policy, self._weaken), spec)
        if "error" in reply:
            self._end_processes()
            raise isolation.unavailable(reply["errno"], reply["error"])
        if policy.network is not None:
            self._open_network()
        self._state = "live"

    def _open_network(self) -> None:
        """Lend the proxy a socket that listens inside the box."""
        channel = self._shared.launcher.open("work", self.id, {}, {"op": "listen", "port": PORT})
        with channel:
            channel.settimeout(REPLY_S)
            data, handles, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not handles:
            self._end_processes()
            raise SandboxInfraError(
                f"The box's network cannot be opened: {data!r}.{self._shared.launcher.log()}"
            )
        gateway().add(self.id, self.policy, self._log, handles[0])

    def _end_processes(self) -> None:
        """End the box's processes and forget its upper layer."""
        if self.policy.network is not None:
            gateway().remove(self.id)
        try:
            self._ask("close", {})
        except (SandboxDead, SandboxInfraError):
            if self._shared.launcher.process.poll() is None:
                raise
        if self._directory is not None:
            self._shared.launcher.janitor.take(self._directory)
            self._directory = None

    def close(self) -> None:
        """End everything in the box and remove it. More than once does no harm."""
        with self._lock:
            if self._state == "closed":
                return
            if self._state != "hibernated":
                self._end_processes()
            self._state = "closed"
            self._shared.release(self._layers)
            self._log("close")
