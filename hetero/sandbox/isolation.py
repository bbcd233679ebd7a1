"""Tiers of isolation, what each gives, and the refusal to step down."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal

from hetero.errors import ArgumentError
from hetero.sandbox.errors import IsolationUnavailable

Tier = Literal["process", "landlock", "ns", "ns+cgroup", "bwrap", "gvisor", "microvm"]
TIERS: tuple[Tier, ...] = ("process", "landlock", "bwrap", "ns", "ns+cgroup", "gvisor", "microvm")
"""Weakest first."""


@dataclass(frozen=True)
class Report:
    """What a box really has.

    Attributes:
        tier: its tier.
        limits: limit -> "hard" (the kernel refuses), "soft" (watched from outside and killed) or "none".
        weakened: defences that were switched off for a test; empty in earnest.
    """

    tier: Tier
    limits: dict[str, str]
    weakened: tuple[str, ...] = ()


def rank(tier: str) -> int:
    """Position in TIERS. Raises ArgumentError for an unknown name."""
    if tier not in TIERS:
        raise ArgumentError(f"There is no isolation tier {tier!r}; the tiers are {', '.join(TIERS)}.")
    return TIERS.index(tier)


def report(controllers: list[str], disk_hard: bool, weaken: tuple[str, ...]) -> Report:
    """The report of a box of our own launcher."""
    hard = {name: "hard" if name in controllers else "soft" for name in ("memory", "cpu")}
    tier: Tier = "ns+cgroup" if "memory" in controllers and "pids" in controllers else "ns"
    limits = {
        "wall": "hard",
        "memory": hard["memory"],
        "cpus": "hard",
        "cpu_s": "soft",
        "pids": "hard",
        "disk": "hard" if disk_hard else "soft",
        "inodes": "hard" if disk_hard else "soft",
        "output": "hard",
        "open_files": "hard",
    }
    return Report(tier, limits, weaken)


def watched_report(tier: Tier, **hard: str) -> Report:
    """The report of a tier without control groups or overlay: `hard` names what is not "soft" there."""
    soft = ("wall", "memory", "cpu_s", "pids", "disk", "inodes")
    limits = {**dict.fromkeys(soft, "soft"), "cpus": "hard", "output": "hard", "open_files": "hard"}
    return Report(tier, {**limits, **hard})


def require(wanted: str, got: Report) -> None:
    """Raise IsolationUnavailable when `got` is weaker than `wanted`."""
    if rank(got.tier) < rank(wanted):
        fixes = {
            "ns": "Use the tier ns (the default), or name a weaker one as min_isolation, too.",
            "ns+cgroup": "Run as root, where control groups can be made.",
        }
        raise IsolationUnavailable(
            f"Isolation {wanted!r} was required; here is {got.tier!r}.",
            fixes.get(
                wanted, f'Create the box with tier="{wanted}"; `hetero sandbox doctor` says what it needs.'
            ),
        )


@functools.cache
def causes() -> dict[int, tuple[str, str]]:
    """errno of making a box -> (cause, fix), as far as the machine's settings tell."""
    sysctl = {name: _sysctl(name) for name in _SYSCTLS}
    found = {
        28: (
            "user namespaces are used up or switched off",
            "Set sysctl user.max_user_namespaces to 10000 or more.",
        ),
        1: ("this process may not make user namespaces", "Allow unshare in the container's seccomp profile."),
        13: (
            "the boxes' user cannot reach the store or a layer of the image",
            "Put them (HETERO_STORE) where other users may pass: directories of mode 755 up to the root.",
        ),
        22: (
            "the store lies on a file system that overlayfs cannot write to",
            "Set HETERO_STORE to a directory on ext4, xfs, btrfs or tmpfs.",
        ),
        38: ("this kernel lacks a system call that is needed", "Use Linux 5.12 or newer."),
        24: ("too many open files", "Raise the hard limit of open files (ulimit -Hn)."),
        11: ("too many processes", "Raise the limit of processes (ulimit -u) or pids.max of the container."),
    }
    if sysctl["kernel.unprivileged_userns_clone"] == "0":
        found[1] = ("user namespaces are for root only", "Set sysctl kernel.unprivileged_userns_clone=1.")
    if sysctl["kernel.apparmor_restrict_unprivileged_userns"] == "1":
        found[1] = found[13] = (
            "AppArmor denies user namespaces to programs without a profile",
            "Add a profile with `userns,` for this Python interpreter to /etc/apparmor.d and reload it.",
        )
    return found


_SYSCTLS = (
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
    "user.max_user_namespaces",
)


def _sysctl(name: str) -> str:
    path = "/proc/sys/" + name.replace(".", "/")
    if not os.path.exists(path):
        return ""
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def unavailable(number: int, message: str) -> IsolationUnavailable:
    """The error for a box that could not be made."""
    cause, fix = causes().get(number, ("", "Run `hetero sandbox doctor`."))
    because = f": {cause}" if cause else ""
    return IsolationUnavailable(f"A sandbox could not be made ({message}){because}.", fix)
