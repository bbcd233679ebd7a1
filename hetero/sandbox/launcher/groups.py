"""Control groups of boxes, where the launcher may make them (root): hard limits on memory, processes and
CPU."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ROOT = "/sys/fs/cgroup"
_PERIOD = 100_000


class Groups:
    """One parent group of this launcher; one child per box. v1 hierarchies and v2 alike."""

    def __init__(self, name: str, wanted: bool = True) -> None:
        self.parents: dict[str, str] = {}
        if not wanted or os.geteuid() != 0:
            return
        unified = os.path.join(ROOT, "cgroup.controllers")
        if os.path.exists(unified):
            self._try_unified(unified, name)
        else:
            realtime = os.sched_getscheduler(0) in (
                os.SCHED_FIFO,
                os.SCHED_RR,
            )  # may not join a group of v1's cpu
            for controller in ("memory", "pids", *(() if realtime else ("cpu",))):
                self._try(controller, os.path.join(ROOT, controller, name))

    def _try(self, controller: str, path: str) -> None:
        if not os.path.isdir(os.path.dirname(path)):
            return
        try:
            os.mkdir(path)
        except OSError:
            return
        self.parents[controller] = path

    def _try_unified(self, unified: str, name: str) -> None:
        path = os.path.join(ROOT, name)
        try:
            with open(unified) as file:
                offered = set(file.read().split()) & {"memory", "pids", "cpu"}
            _set(os.path.join(ROOT, "cgroup.subtree_control"), " ".join(f"+{name}" for name in offered))
            os.mkdir(path)
            _set(os.path.join(path, "cgroup.subtree_control"), " ".join(f"+{name}" for name in offered))
        except OSError:
            if os.path.isdir(path):
                os.rmdir(path)
            return
        self.parents = {"unified": path, **dict.fromkeys(offered, path)}

    def make(self, box: str, limits: dict[str, Any]) -> list[int]:
        """Groups for a box; descriptors of their cgroup.procs files. Raises OSError."""
        handles = []
        unified = "unified" in self.parents
        for controller, parent in self._controllers():
            path = os.path.join(parent, box)
            os.mkdir(path)
            for name, value in _settings(controller, limits, unified):
                _set(os.path.join(path, name), value)
            handles.append(os.open(os.path.join(path, "cgroup.procs"), os.O_WRONLY))
        return handles

    def _controllers(self) -> list[tuple[str, str]]:
        if "unified" in self.parents:
            return [("unified", self.parents["unified"])]
        return list(self.parents.items())

    def oom_kills(self, box: str) -> int:
        """How often the kernel killed something of the box for memory."""
        for controller, name in (("memory", "memory.oom_control"), ("memory", "memory.events")):
            path = os.path.join(self.parents.get(controller, ""), box, name)
            if os.path.exists(path):
                with open(path) as file:
                    return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        return 0

    def remove(self, box: str) -> bool:
        """Remove a box's groups; False if something in them has not ended yet."""
        for _, parent in self._controllers():
            try:
                os.rmdir(os.path.join(parent, box))
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def kill(self, box: str) -> None:
        """Kill whatever is left in a box's groups."""
        for _, parent in self._controllers():
            try:
                with open(os.path.join(parent, box, "cgroup.procs")) as file:
                    pids = [int(row) for row in file]
            except OSError:
                continue
            for pid in pids:
                os.kill(pid, 9)

    def close(self) -> None:
        """Remove the parents."""
        for _, parent in self._controllers():
            try:  # noqa: SIM105 (contextlib is large)
                os.rmdir(parent)
            except OSError:
                pass


def _settings(controller: str, limits: dict[str, Any], unified: bool) -> list[tuple[str, str]]:
    settings = []
    if limits["memory"] and controller in ("memory", "unified"):
        settings.append(("memory.max" if unified else "memory.limit_in_bytes", str(limits["memory"])))
    if limits["pids"] and controller in ("pids", "unified"):
        settings.append(("pids.max", str(limits["pids"])))
    if limits["cpus"] and controller in ("cpu", "unified"):
        quota = str(max(int(limits["cpus"] * _PERIOD), 1000))
        if unified:
            settings.append(("cpu.max", f"{quota} {_PERIOD}"))
        else:
            settings.append(("cpu.cfs_quota_us", quota))
    return settings


def _set(path: str, value: str) -> None:
    if value:
        with open(path, "w") as file:
            file.write(value)
