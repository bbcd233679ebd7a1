"""Boxes whose tree is a plain copy of their layers: what the tiers without overlayfs have in common.

A snapshot is a sealed tree, a fork is a copy of it: hundreds of milliseconds per 100 MB, where the file
system cannot share blocks. Every command and every file operation is a process of its own (the runner), which
hangs on the box's lifeline: when the owner closes the box or dies, it ends its command.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.sandbox import isolation
from hetero.sandbox.client import REPLY_S, boot_code, receive
from hetero.sandbox.errors import (
    CapabilityUnavailable,
    ImageError,
    LimitUnavailable,
    SandboxDead,
    SandboxInfraError,
)
from hetero.sandbox.image import skeleton
from hetero.sandbox.launcher import brand, tree, wire
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot
from hetero.sandbox.store import outer_ids

_CODE = boot_code("hetero.sandbox.runner.start")


class Runner:
    """One runner process; what a Process needs to know of the one that serves it."""

    def __init__(self, request: Mapping[str, Any], lifeline: int, tty: int, log: Path) -> None:
        self._log = log
        self.channel, theirs = socket.socketpair()
        passed = [theirs.fileno(), lifeline, *([tty] if tty >= 0 else [])]
        argv = [sys.executable, "-I", "-S", "-c", _CODE, str(passed[0]), str(lifeline), str(tty)]
        with theirs, open(log, "ab") as errors:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                start_new_session=True,  # who ends the owner's process group leaves it to the runner
                pass_fds=passed,
            )
        with contextlib.suppress(OSError):  # it has ended already; the missing answer says so
            self.channel.sendall(wire.pack(dict(request)))

    def gone(self) -> SandboxDead:
        """The error that says that it ended without an answer."""
        return SandboxDead(f"The command's runner has ended (status {self.process.poll()}).{self.log()}")

    def log(self) -> str:
        """The last words of runners."""
        with contextlib.suppress(OSError):
            text = self._log.read_text(errors="replace").strip()
            return f" Its log ends with: {text[-500:]}" if text else ""
        return ""


class CopiedSandbox(Sandbox):
    """Base of the tiers landlock, bwrap and gvisor."""

    _lifeline: tuple[int, int] | None = None
    _base: tuple[int, int] = (0, 0)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runners: list[Runner] = []

    def _wrapper(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the tier adds to the request of a command."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise IsolationUnavailable, CapabilityUnavailable or LimitUnavailable before anything is made."""
        if self.policy.limits.disk_hard:
            raise LimitUnavailable(
                f"The tier {self.tier} watches the disk and cannot cap it.", "Use the tier ns."
            )
        if self.policy.network is not None:
            raise CapabilityUnavailable(
                f"The tier {self.tier} has no way out for a proxy.", "Use the tier ns."
            )
        if self._weaken:
            raise CapabilityUnavailable(f"The tier {self.tier} has no switches to weaken it.")

    @property
    def _tree(self) -> str:
        return f"{self._directory}/tree"

    def _start(self, min_isolation: str = "") -> None:
        if self._isolation is None:
            self._check()
            isolation.require(min_isolation or self.tier, self.isolation)
        run, policy = self._shared.launcher.run, self.policy
        paths = (*policy.writable, *policy.readable)
        lowest = skeleton(run, self.image, paths, policy.uid)
        self._directory = run.new_directory("boxes", f"{self.id}-{secrets.token_hex(3)}")
        run.new_directory(f"boxes/{self._directory.name}", "tree")
        self._lifeline = os.pipe()
        try:
            made = self._fill((*self._layers, lowest), self._tree, f"{self._directory}/inventory")
            self._base = made["bytes"], made["entries"]
            self._prove()
        except BaseException:
            self._end_processes()
            raise
        self._state = "live"

    def _prove(self) -> None:
        """Run something harmless, where only that tells whether boxes can be made. Raises
        IsolationUnavailable."""

    def _fill(self, layers: tuple[str, ...], target: str, inventory: str = "") -> dict[str, Any]:
        request = {"op": "fill", "layers": list(layers), "target": target, "inventory": inventory}
        reply = self._reply(request)
        if "error" in reply:
            raise ImageError(f"The image cannot be copied: {reply['error']}.")
        found: dict[str, Any] = reply["ok"]
        return found

    def _runner(self, request: Mapping[str, Any], tty: int = -1) -> Runner:
        assert self._lifeline is not None
        details = {**request, "box": self.id, "outer": outer_ids(), "tree": self._tree, "way": self.tier}
        return Runner(details, self._lifeline[0], tty, self._shared.launcher.run.path / "launcher.log")

    def _reply(self, request: Mapping[str, Any]) -> Any:
        return self._answer(self._runner(request))

    def _answer(self, runner: Runner) -> Any:
        """The one answer of a runner."""
        with runner.channel:
            runner.channel.settimeout(REPLY_S)
            reply = receive(runner.channel)
        if reply is None:
            raise SandboxInfraError(f"A runner of box {self.id} gave no answer.{runner.log()}")
        runner.process.wait()
        return reply

    def _work(self, request: dict[str, Any]) -> Any:
        if request["op"] == "changes":
            request["inventory"] = f"{self._directory}/inventory"
        policy = self.policy
        request["fence"] = (self._tree, list(policy.writable), list(policy.protected))
        return self._reply(request)

    def _open(
        self, request: dict[str, Any], files: tuple[int, ...], warm: str = ""
    ) -> tuple[socket.socket, Any]:
        sums = request["sums"]
        watched = {"disk": sums["disk"] + self._base[0], "inodes": sums["inodes"] + self._base[1]}
        request["sums"] = {**sums, **watched, "processes": None}
        runner = self._runner(self._wrapper(request), files[0] if files else -1)
        self._forget([each for each in self._runners if each.process.poll() is not None])
        self._runners.append(runner)
        return runner.channel, runner

    def _end_commands(self) -> None:
        """Let the lifeline go and wait until every runner has ended its command."""
        if self._lifeline is not None:
            for handle in self._lifeline:
                os.close(handle)
            self._lifeline = None
        for runner in self._runners:
            runner.process.wait()
        self._forget(self._runners)

    def _forget(self, ended: list[Runner]) -> None:
        """Of runners that were killed, their guardians included, processes may be left."""
        if any(runner.process.returncode for runner in ended):
            try:
                brand.end({self.id})
            except OSError as error:
                raise SandboxInfraError(f"Box {self.id} cannot be closed: {error}.") from error
        self._runners = [each for each in self._runners if each not in ended]

    def _end_processes(self) -> None:
        self._end_commands()
        if self._directory is not None:
            tree.remove(str(self._directory))
            self._directory = None

    def _seal(self, mode: str, restart: bool = True) -> Snapshot[Sandbox]:
        run, name = self._shared.launcher.run, secrets.token_hex(6)
        target, older = run.path / "layers" / name, self._layers
        if self.state == "hibernated":
            self._shared.hold(older)
            return Snapshot(name, older, self)
        if mode == "frozen_copy":
            run.new_directory("layers", name)
            for process in list(self._running):
                process.set_frozen("freeze")
            try:
                self._fill((self._tree,), str(target))
            finally:
                for process in list(self._running) if self.state == "live" else ():
                    process.set_frozen("thaw")
            self._shared.hold((str(target),))
            return Snapshot(name, (str(target),), self)
        self._end_commands()
        Path(self._tree).rename(target)
        self._end_processes()
        self._layers = (str(target),)
        self._shared.hold(self._layers)  # the box's
        self._shared.hold(self._layers)  # the snapshot's
        self._shared.release(older)
        if restart:
            self._start()
        return Snapshot(name, self._layers, self)
