"""Turns a policy into what the launcher is told: the spec of a box, the request of a command."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.sandbox.image import Image, host_binds
from hetero.sandbox.network import environment
from hetero.sandbox.policy import Policy

_MB = 1 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {
    "PATH": _PATH,
    "HOME": "/home/agent",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}
LOGGED_CHANGES = 200
_SHM_MB = 64
_OWN_INODES = 16
"""Of the box's own directories."""


def box_spec(
    directory: str, layers: Sequence[str], image: Image, policy: Policy, weaken: tuple[str, ...]
) -> dict[str, Any]:
    """The frame that a box's first process reads. `layers`: newest first, skeleton last."""
    limits, bounded = policy.limits, "disk" not in weaken
    return {
        "dir": directory,
        "layers": list(layers),
        "upper": "tmpfs" if limits.disk_hard else "disk",
        "disk_bytes": limits.disk_mb * _MB if bounded else 0,
        "inodes": limits.inodes + _OWN_INODES if bounded else 0,
        "shm_bytes": min(_SHM_MB, limits.memory_mb or _SHM_MB) * _MB,
        "binds": [*host_binds(image), *((path, path) for path in policy.readable)],
        "writable": list(policy.writable),
        "protected": list(policy.protected),
        "uid": policy.uid,
        "weaken": list(weaken),
    }


def group_limits(policy: Policy, weaken: tuple[str, ...]) -> dict[str, Any]:
    """What control groups are set to, and what the launcher must know before it forks."""
    limits = policy.limits
    return {
        "uid": policy.uid,
        "weaken": list(weaken),
        "memory": limits.memory_mb * _MB if limits.memory_mb and "memory" not in weaken else None,
        "pids": limits.pids if "nproc" not in weaken else None,
        "cpus": limits.cpus,
        "nice": limits.nice,
    }


def arguments(command: str | Sequence[str]) -> list[str]:
    """A string runs in bash, never a login shell: profile scripts cost a third of a second."""
    return ["bash", "-c", command] if isinstance(command, str) else [str(part) for part in command]


def printable(command: str | Sequence[str]) -> str:
    """A command as one would type it."""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def exec_request(
    argv: list[str],
    policy: Policy,
    weaken: tuple[str, ...],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin: bytes | None,
    timeout: float | None,
    stream: bool,
    hard_memory: bool,
    cores: set[int],
) -> dict[str, Any]:
    """The frame that a command's worker reads."""
    limits = policy.limits
    memory = limits.memory_mb * _MB if limits.memory_mb and "memory" not in weaken else None
    watched = "disk" not in weaken and not limits.disk_hard
    return {
        "op": "exec",
        "argv": argv,
        "env": {**_ENVIRONMENT, **(environment() if policy.network else {}), **dict(policy.env), **env},
        "cwd": cwd,
        "stdin": stdin,
        "timeout": timeout,
        "limits": {
            "cpu": None if limits.cpu_s is None else max(round(limits.cpu_s + 1), 1),
            "file": limits.disk_mb * _MB if watched else None,
            "space": None if hard_memory or memory is None else memory + 256 * _MB,
            "processes": limits.pids if "nproc" not in weaken else None,
            "files": limits.open_files,
            "core": 1 if "core" not in weaken else -1,
        },
        "sums": {
            "memory": None if hard_memory else memory,
            "cpu": limits.cpu_s,
            "disk": limits.disk_mb * _MB if watched else 0,
            "inodes": limits.inodes if watched else 0,
        },
        "uid": policy.uid,
        "out_keep": limits.out_keep if "output" not in weaken else 1 << 30,
        "out_kill": limits.out_kill,
        "stream": stream,
        "nice": limits.nice,
        "cores": list(cores),
        "anonymous_files": hard_memory or "memory" in weaken or memory is None,
        "readable": ["/"],
        "writable": [*policy.writable, "/dev", "/proc"],
        "sockets": True,
        "changes": LOGGED_CHANGES,
        "asked": time.monotonic(),
        "weaken": list(weaken),
    }


def cores_for(policy: Policy, box: str, quota: bool) -> set[int]:
    """Cores that a box may use where no quota can be set: chosen by its id, so that boxes spread."""
    if policy.limits.cpus is None or quota:
        return set()
    available = sorted(os.sched_getaffinity(0))
    count = min(max(round(policy.limits.cpus), 1), len(available))
    start = int(box[-4:], 16) % len(available)
    return {available[(start + index) % len(available)] for index in range(count)}
