"""What a box is: its identity, its layers, its state, and its line to the launcher and the journal."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hetero.sandbox import isolation
from hetero.sandbox.context import Context
from hetero.sandbox.errors import SandboxDead, SandboxInfraError
from hetero.sandbox.image import Image, skeleton
from hetero.sandbox.launcher import tree
from hetero.sandbox.policy import Policy
from hetero.sandbox.process import Process
from hetero.sandbox.request import box_spec, group_limits

State = Literal["live", "frozen", "hibernated", "closed"]


class BoxState:
    """Base of the parts of Sandbox."""

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
        self._lock = threading.RLock()
        self._state: State = "closed"
        self._directory: Path | None = None
        self._isolation: isolation.Report | None = None

    @property
    def isolation(self) -> isolation.Report:
        """The tier, and which limits are hard."""
        if self._isolation is None:
            controllers = self._shared.controllers()
            self._isolation = isolation.report(controllers, self.policy.limits.disk_hard, self._weaken)
        return self._isolation

    @property
    def state(self) -> str:
        """ "live", "frozen", "hibernated" or "closed"."""
        return self._state

    def _ask(self, operation: str, details: Any, frame: Any = None) -> Any:
        return self._shared.launcher.ask(operation, self.id, details, frame)

    def _log(self, event: str, **fields: Any) -> None:
        lineage = {"parent": self.parent} if self.parent else {}
        weakened = {"weakened": list(self._weaken)} if self._weaken else {}
        labels = {"labels": self.labels} if event == "create" and self.labels else {}
        self._shared.audit.write(sandbox=self.id, event=event, **lineage, **weakened, **labels, **fields)

    def _need(self, *states: str) -> None:
        if self._state not in states:
            raise SandboxDead(f"Sandbox {self.id} is {self._state}; this needs it {' or '.join(states)}.")

    def _start(self, min_isolation: str = "ns") -> None:
        """Make the box's processes over its layers and an empty upper one."""
        shared, policy = self._shared, self.policy
        run = shared.launcher.run
        if self._isolation is None:
            isolation.require(min_isolation, self.isolation)
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
        self._state = "live"

    def _end_processes(self) -> None:
        """End the box's processes and forget its upper layer."""
        try:
            self._ask("close", {})
        except (SandboxDead, SandboxInfraError):
            if self._shared.launcher.process.poll() is None:
                raise
        if self._directory is not None:
            tree.remove(str(self._directory))
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
