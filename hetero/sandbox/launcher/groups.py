"""Control groups of boxes, where the launcher may make them (root): hard limits on memory, processes and
CPU."""

from __future__ import annotations

import os

from hetero.sandbox.launcher import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PERIOD = 100_000
_SHARES, _WEIGHT = 1024, 100
"""What the kernel gives a group of v1 and v2 by default: as much as a process of niceness 0."""
_STEP = 1.25
"""What one step of niceness is worth."""
_IF_THERE = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Files that only machines with swap have."""


class Seat:
    """How processes come into a box's groups, without waiting for the rest of the machine: moving another
    process waits for an RCU grace period, which takes longer than all else that starts a command.

    Attributes:
        birth: directory of the v2 group that they are born into; -1 for none.
        tasks: `tasks` files of v1 groups, into which they write themselves.
    """

    def __init__(self, birth: int = -1, tasks: tuple[int, ...] = ()) -> None:
        self.birth, self.tasks = birth, tasks

    def handles(self) -> tuple[int, ...]:
        """All descriptors."""
        return self.tasks if self.birth < 0 else (self.birth, *self.tasks)

    def take(self) -> None:
        """In the new process: enter v1 groups, and see no path of any group from now on."""
        for tasks in self.tasks:
            os.write(tasks, b"0")
        k.unshare(k.CLONE_NEWCGROUP)


class Groups:
    """One parent group of this launcher; one child per box. v1 hierarchies and v2 alike.

    Args:
        name: of the parent.
        root: where the hierarchies are mounted; "" for no groups.
        outer: host uid and gid of boxes. Their workers, which are no longer root, put commands into groups.
    """

    def __init__(self, name: str, root: str, outer: tuple[int, int]) -> None:
        self.parents: dict[str, str] = {}
        self._nice: dict[str, int] = {}
        self._nicest = 0
        self._root, self._outer = root, outer
        if not root or os.geteuid() != 0:
            return
        unified = os.path.join(root, "cgroup.controllers")
        if os.path.exists(unified):
            self._try_unified(unified, name)
        else:
            realtime = os.sched_getscheduler(0) in (
                os.SCHED_FIFO,
                os.SCHED_RR,
            )  # may not join a group of v1's cpu
            for controller in ("memory", "pids", *(() if realtime else ("cpu",))):
                self._try(controller, os.path.join(root, controller, name))

    def _try(self, controller: str, path: str) -> None:
        if not os.path.isdir(os.path.dirname(path)):
            return
        try:
            os.mkdir(path)
        except OSError:
            return
        self.parents[controller] = path

    def _try_unified(self, unified: str, name: str) -> None:
        """Who puts a process into a group must be able to write to the next group above that both the process
        and the group have in common; so this launcher, and with it the workers, moves beside the boxes."""
        path = os.path.join(self._root, name)
        try:
            with open(unified) as file:
                offered = set(file.read().split()) & {"memory", "pids", "cpu"}
            _set(os.path.join(self._root, "cgroup.subtree_control"), " ".join(f"+{name}" for name in offered))
            os.makedirs(os.path.join(path, "launcher"))
            os.chown(os.path.join(path, "cgroup.procs"), *self._outer)
            _set(os.path.join(path, "launcher", "cgroup.procs"), "0")
            _set(os.path.join(path, "cgroup.subtree_control"), " ".join(f"+{name}" for name in offered))
        except OSError:
            self._leave(path)
            return
        self.parents = {"unified": path, **dict.fromkeys(offered, path)}

    def _leave(self, path: str) -> None:
        try:
            _set(os.path.join(self._root, "cgroup.procs"), "0")
            os.rmdir(os.path.join(path, "launcher"))
            os.rmdir(path)
        except OSError:
            pass  # never made; or a box's process is about to end, and the next launcher sweeps

    def make(self, box: str, limits: dict[str, Any]) -> Seat:
        """Groups for a box. Raises OSError."""
        birth, tasks = -1, []
        self._nice[box] = limits["nice"]
        self._weigh()
        unified = "unified" in self.parents
        for controller, parent in self._controllers():
            path = os.path.join(parent, box)
            os.mkdir(path)
            for name, value in _settings(set(self.parents) if unified else {controller}, limits, unified):
                if name not in _IF_THERE or os.path.exists(os.path.join(path, name)):
                    _set(os.path.join(path, name), value)
            if unified:
                os.chown(os.path.join(path, "cgroup.procs"), *self._outer)
                birth = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            else:
                tasks.append(os.open(os.path.join(path, "tasks"), os.O_WRONLY))
        return Seat(birth, tuple(tasks))

    def _weigh(self) -> None:
        """Let all boxes together weigh as much beside the rest of the machine as one process of the niceness
        of the least nice of them."""
        nice = min(self._nice.values(), default=self._nicest)
        if nice != self._nicest and "cpu" in self.parents:
            name, value = _weight(nice, "unified" in self.parents)
            _set(os.path.join(self.parents["cpu"], name), value)
        self._nicest = nice

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
        if self._nice.pop(box, None) is not None:
            self._weigh()
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
        for controller, parent in self._controllers():
            if controller == "unified":
                self._leave(parent)
                continue
            try:  # noqa: SIM105 (contextlib is large)
                os.rmdir(parent)
            except OSError:
                pass


def _settings(controllers: set[str], limits: dict[str, Any], unified: bool) -> list[tuple[str, str]]:
    """(file, value) in the order in which they must be written; swap counts as memory."""
    settings = []
    if limits["memory"] and "memory" in controllers:
        size = str(limits["memory"])
        names = ("memory.max",) if unified else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        settings += [(name, size) for name in names]
        settings += [("memory.swap.max", "0")] if unified else []
    if limits["pids"] and "pids" in controllers:
        settings.append(("pids.max", str(limits["pids"] + 1)))  # a command's init is one, too
    if "cpu" in controllers:
        settings.append(_weight(limits["nice"], unified))
    if limits["cpus"] and "cpu" in controllers:
        quota = str(max(int(limits["cpus"] * _PERIOD), 1000))
        settings.append(("cpu.max", f"{quota} {_PERIOD}") if unified else ("cpu.cfs_quota_us", quota))
    return settings


def _weight(nice: int, unified: bool) -> tuple[str, str]:
    """(file, value) that stands for a niceness."""
    name, usual = ("cpu.weight", _WEIGHT) if unified else ("cpu.shares", _SHARES)
    return name, str(min(max(round(usual * _STEP**-nice), 2), 10_000))


def _set(path: str, value: str) -> None:
    if value:
        with open(path, "w") as file:
            file.write(value)
