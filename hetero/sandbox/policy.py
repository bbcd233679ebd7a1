"""What a sandbox may do: paths, limits, and who decides in doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetero.errors import ArgumentError
from hetero.sandbox.network import Network


@dataclass(frozen=True)
class Limits:
    """Limits of one box and of each command in it. None means no limit.

    Attributes:
        wall_s: deadline of a command, unless `exec` names another.
        cpu_s: CPU time of a command, summed over its processes.
        cpus: cores: a quota where control groups can be made, else so many cores to run on.
        memory_mb: memory of the box where control groups can be made, else of each command (watched, and a
            hard limit on the address space of each process).
        pids: processes and threads at once.
        disk_mb, inodes: size of what the box has written.
        disk_hard: keep what is written in memory, in a file system of exactly that size.
        out_keep: bytes of output that are kept, half from its head and half from its tail.
        out_kill: bytes of output after which the command is killed.
        open_files: descriptors of a process.
        nice: lowered priority of commands beside the trainer, 0 to 19. With the control group of the CPU it
            is the weight of the box's group, and of all boxes together beside the rest. Without, it is the
            niceness of the processes, which counts among all processes of the machine only where the sysctl
            kernel.sched_autogroup_enabled is 0: else each command, a session, weighs as much as any other.
    """

    wall_s: float | None = 60.0
    cpu_s: float | None = None
    cpus: float | None = 1.0
    memory_mb: int | None = 2048
    pids: int = 256
    disk_mb: int = 1024
    inodes: int = 100_000
    disk_hard: bool = False
    out_keep: int = 65_536
    out_kill: int = 16 << 20
    open_files: int = 1024
    nice: int = 5

    def __post_init__(self) -> None:
        for name in ("pids", "disk_mb", "inodes", "out_keep", "out_kill", "open_files"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Limits.{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 <= self.nice <= 19:
            raise ArgumentError(f"Limits.nice is {self.nice}; a sandbox may have 0 to 19.")
        for name in ("wall_s", "cpu_s", "cpus", "memory_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"Limits.{name} is {value}; it must be positive, or None for no limit.")


@dataclass(frozen=True)
class Event:
    """What a decision callback is asked about.

    Attributes:
        kind: "exec", "write" or "net".
        sandbox: the box's id.
        detail: argv and cwd; or path and size; or method, host, port and addresses.
    """

    kind: str
    sandbox: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """Answer of a decision callback: "allow", "deny" or "flag" (allow, and mark it in the audit)."""

    verdict: Literal["allow", "deny", "flag"]
    reason: str = ""


ALLOW = Decision("allow")


def deny(reason: str) -> Decision:
    """Refuse the action."""
    return Decision("deny", reason)


def flag(reason: str) -> Decision:
    """Let the action pass and mark it."""
    return Decision("flag", reason)


@dataclass(frozen=True)
class Policy:
    """What a box may see and do.

    Attributes:
        readable: host paths shown read-only at the same place.
        writable: paths inside that may be written; all else is read-only. "/" makes the whole tree writable.
        protected: paths inside the writable ones that stay read-only.
        network: what may be reached through the proxy; None for nothing.
        limits: see Limits.
        on_event: decides on commands, writes through the API and connections. Commands are judged by
            their text, for audit and reward shaping; what they can really do is for the kernel to forbid.
        env: environment of every command, added to a small fixed one. The host's is never passed on.
        uid: the number of the box's one user, inside.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ("/workspace", "/tmp", "/home/agent")
    protected: tuple[str, ...] = ()
    network: Network | None = None
    limits: Limits = field(default_factory=Limits)
    on_event: Callable[[Event], Decision] | None = None
    env: tuple[tuple[str, str], ...] = ()
    uid: int = 1000

    def __post_init__(self) -> None:
        for name in ("readable", "writable", "protected"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for path in getattr(self, name):
                if not path.startswith("/") or ".." in path.split("/"):
                    raise ArgumentError(f"Policy.{name} has {path!r}; paths are absolute and without '..'.")

    def with_limits(self, **changes: Any) -> Policy:
        """The same policy with some limits changed."""
        return replace(self, limits=replace(self.limits, **changes))
