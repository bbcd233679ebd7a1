"""The tier microvm: boxes of a remote service with E2B's API (E2B, AgentENV), through the same Sandbox.

What the service's public API does not give raises CapabilityUnavailable: paths that are shown, fenced or
protected, terminals, `changes`, and a snapshot without the memory of what runs (mode "stop"; grading needs
it). The whole disk of a box is writable; memory, cores and disk are the template's. Deadlines and output are
watched from here, and a deadline ends the command's main process only. How strong the isolation is, the
service knows.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.sandbox import isolation
from hetero.sandbox.errors import CapabilityUnavailable, IsolationUnavailable, SandboxInfraError
from hetero.sandbox.image import Image
from hetero.sandbox.policy import Policy
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot
from hetero.sandbox.tiers.remote_command import RemoteCommand
from hetero.sandbox.tiers.service import Agent, Refused, Service, dead

TTL_S = 3600
"""After so long without a word from us the service ends a box, so that none outlives its owner for long."""
_KINDS = {"FILE_TYPE_FILE": "file", "FILE_TYPE_DIRECTORY": "directory", "FILE_TYPE_SYMLINK": "link"}


@dataclass
class RemoteSnapshot(Snapshot[Sandbox]):
    """A snapshot that the service keeps until it is closed."""

    def close(self) -> None:
        """Delete it at the service; boxes that came from it live on."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(SandboxInfraError):
                Service.from_environment().call("DELETE", f"/templates/{self.layers[0]}")


@dataclass(frozen=True)
class _Alive:
    """The service, as what serves commands: it is there until a call says otherwise."""

    def poll(self) -> None:
        return None


class RemoteSandbox(Sandbox, tier="microvm"):
    """A box at a service. `Sandbox.create("template", tier="microvm", min_isolation="microvm")`."""

    process = _Alive()
    _remote = ""
    _agent: Agent | None = None
    _ends = 0.0

    @classmethod
    def _image(cls, image: Image | str | Path | None) -> Image:
        if isinstance(image, Image | Path):
            raise CapabilityUnavailable(
                "A service starts from its own templates, not from images of this machine.",
                'Name a template: Sandbox.create("base", tier="microvm", ...).',
            )
        return Image(host=False, template=image or "base")

    def _report(self) -> isolation.Report:
        names = ("memory", "cpus", "cpu_s", "pids", "disk", "inodes", "open_files")
        return isolation.Report("microvm", {"wall": "soft", "output": "soft", **dict.fromkeys(names, "none")})

    def _check(self) -> None:
        policy = self.policy
        fenced = policy.writable not in (Policy().writable, ("/",))
        if policy.network is not None:
            raise CapabilityUnavailable(
                "Rules for hosts and ports cannot be handed to a service.", "Use the tier ns for them."
            )
        if policy.readable or policy.protected or fenced or policy.limits.disk_hard or self._weaken:
            raise CapabilityUnavailable(
                "A remote box shows, fences and protects no paths: its whole disk is its own.",
                "Use a local tier, or leave Policy.readable, writable, protected and disk_hard alone.",
            )

    def _start(self, min_isolation: str = "") -> None:
        service = Service.from_environment()
        if self._state == "hibernated" or self._remote:
            self._connect(service)
            return
        self._check()
        isolation.require(min_isolation or self.tier, self.isolation)
        body = {
            "templateID": self._layers[0] if self._layers else self.image.template,
            "timeout": TTL_S,
            "secure": True,
            "autoPause": False,
            "allow_internet_access": False,
            "metadata": {**self.labels, "hetero": self.id},
        }
        try:
            made = service.call("POST", "/sandboxes", body)
        except Refused as error:
            if error.status in (401, 403):
                raise IsolationUnavailable(
                    f"The service refuses us: {error}.", "Check E2B_API_KEY."
                ) from error
            raise
        self._remote, self._agent = str(made["sandboxID"]), Agent.of(service, made)
        self._ends = time.monotonic() + TTL_S
        try:
            self._agent.ask("filesystem.Filesystem/MakeDir", {"path": "/workspace"})
        except Refused as error:
            if error.code != "already_exists":
                self._end_processes()
                raise
        self._state = "live"

    def _connect(self, service: Service) -> None:
        found = self._call("POST", f"/sandboxes/{self._remote}/connect", {"timeout": TTL_S})
        self._agent, self._ends = Agent.of(service, found), time.monotonic() + TTL_S
        self._state = "live"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return Service.from_environment().call(method, path, body)
        except Refused as error:
            if error.status == 404:
                raise dead(error, self.id) from error
            raise

    def _open(
        self, request: dict[str, Any], files: tuple[int, ...], warm: str = ""
    ) -> tuple[socket.socket, Any]:
        if files:
            raise CapabilityUnavailable("A terminal of this machine cannot be lent to a remote box.")
        assert self._agent is not None
        self._prolong(request["timeout"] or 0.0)
        ours, theirs = socket.socketpair()
        command = RemoteCommand(self._agent, request, theirs)
        threading.Thread(target=command.run, name=f"sandbox-remote-{self.id}", daemon=True).start()
        return ours, self

    def gone(self) -> SandboxInfraError:
        """The error for a service that is not there."""
        return SandboxInfraError("The service is gone.")

    def log(self) -> str:
        """Nothing is known of the service's own words."""
        return ""

    def _work(self, request: dict[str, Any]) -> Any:
        agent, path = self._agent, request.get("path", "")
        assert agent is not None
        self._prolong(0.0)
        try:
            if request["op"] == "read":
                end = request["offset"] + request["max_bytes"]
                self._need_file(agent, path)
                return {"ok": {"data": agent.read(path, end)[request["offset"] :]}}
            if request["op"] == "write":
                agent.write(path, request["data"])
                agent.run(["chmod", f"{request['mode']:o}", path])
                return {"ok": {}}
            if request["op"] == "list":
                return {"ok": self._list(agent, path, request["max_entries"])}
        except Refused as error:
            if error.status == 404 or error.code == "not_found":
                return {"errno": 2, "error": "No such file or directory"}
            if error.status == 507:
                return {"errno": 28, "error": "No space left on device"}
            raise
        raise CapabilityUnavailable("A remote box does not tell what has changed in it.")

    def _prolong(self, needed_s: float) -> None:
        """Move the box's end away when half of its time is over, or a command needs more."""
        now = time.monotonic()
        if self._ends - now < max(TTL_S / 2, needed_s + TTL_S / 2):
            self._call("POST", f"/sandboxes/{self._remote}/timeout", {"timeout": int(needed_s) + TTL_S})
            self._ends = now + int(needed_s) + TTL_S

    def _need_file(self, agent: Agent, path: str) -> None:
        found = agent.ask("filesystem.Filesystem/Stat", {"path": path})["entry"]
        if found.get("type") == "FILE_TYPE_DIRECTORY":
            raise IsADirectoryError(21, "Is a directory", path)

    def _list(self, agent: Agent, path: str, most: int) -> dict[str, Any]:
        found = agent.ask("filesystem.Filesystem/ListDir", {"path": path, "depth": 1}).get("entries", [])
        entries = [
            (
                str(entry["name"]),
                _KINDS.get(str(entry.get("type")), "other"),
                int(entry.get("size", 0)),
                int(entry.get("mode", 0)) & 0o7777,
            )
            for entry in found
        ]
        return {"entries": sorted(entries)[:most], "complete": len(entries) <= most}

    def pause(self, mode: str = "freeze") -> None:
        """The service keeps files and memory, and frees the machine; no command may be running."""
        with self._lock:
            self._need("live")
            if mode != "freeze":
                raise CapabilityUnavailable("A remote box is paused with its memory.", 'Use pause("freeze").')
            if self._running:
                raise CapabilityUnavailable(
                    "The output of a running command does not outlive a remote pause."
                )
            self._call("POST", f"/sandboxes/{self._remote}/pause")
            self._state = "hibernated"
            self._log("pause", mode=mode)

    def _seal(self, mode: str, restart: bool = True) -> Snapshot[Sandbox]:
        if mode != "frozen_copy":
            raise CapabilityUnavailable(
                "A remote snapshot holds the memory of all that runs; none can be taken without.",
                'Use snapshot("frozen_copy"), and know that its forks go on with those processes.',
            )
        self._need("live")
        name = str(self._call("POST", f"/sandboxes/{self._remote}/snapshots", {})["snapshotID"])
        return RemoteSnapshot(name, (name,), self)

    def fork(self, n: int = 1) -> list[Sandbox]:
        """`n` boxes that continue from here, with what runs."""
        with self.snapshot("frozen_copy") as snap:
            return snap.fork(n)

    def _end_processes(self) -> None:
        if self._remote:
            try:
                Service.from_environment().call("DELETE", f"/sandboxes/{self._remote}")
            except Refused as error:
                if error.status != 404:
                    raise
            self._remote = ""

    def close(self) -> None:
        """Kill the box at the service. More than once does no harm."""
        with self._lock:
            if self._state == "closed":
                return
            self._end_processes()
            self._state = "closed"
            self._shared.release(self._layers)
            self._log("close")
