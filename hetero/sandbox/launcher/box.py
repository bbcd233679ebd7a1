"""The first process of a box: makes the tree, says so, then only waits for its owner's death or `close`."""

from __future__ import annotations

import _socket
import fcntl
import os
import struct
import time

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import root, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAMESPACES = (
    k.CLONE_NEWUSER | k.CLONE_NEWNS | k.CLONE_NEWPID | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS
)
ENTERED = NAMESPACES & ~k.CLONE_NEWPID
"""What a worker joins: its commands get a PID namespace of their own, so that a deadline kills exactly
them."""

UPPER = 5
"""Descriptor of the upper layer in the first process: workers find it in its /proc/PID/fd."""


def namespaces(weaken: list[str]) -> int:
    """The namespaces of a new box."""
    return NAMESPACES & ~(k.CLONE_NEWNET if "network" in weaken else 0)


def map_user(pid: int, inner: int, outer: tuple[int, int]) -> None:
    """Give the box's one user and group a number inside; called by the launcher, from outside."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner} {outer[0]} 1"),
        ("gid_map", f"{inner} {outer[1]} 1"),
    ):
        handle = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


def become(inner: int) -> None:
    """Be the box's user, whoever the launcher is; capabilities in the namespace stay."""
    if os.getresuid() != (inner, inner, inner):
        os.setresgid(inner, inner, inner)
        os.setresuid(inner, inner, inner)


def live(spec: dict[str, Any], channel: int, mapped: int, lifeline: int) -> None:
    """Body of the first process; never returns.

    Args:
        mapped: descriptor on which the launcher writes one byte when the user is mapped.
        lifeline: descriptor that ends when the launcher closes the box or dies.
    """
    weaken = spec["weaken"]
    try:
        if UPPER in (channel, mapped, lifeline):
            raise OSError(9, "the launcher's descriptors are out of order")
        k.close_all_but((0, 1, 2, channel, mapped, lifeline))
        if os.read(mapped, 1) != b"m":
            os._exit(1)
        sources = [os.open(source, os.O_PATH) for source, _ in spec["binds"]]
        become(spec["uid"])
        if "lifeline" not in weaken:
            k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
        upper = root.build(spec, sources)
        k.sethostname(b"sandbox")
        if "network" not in weaken:
            _loopback()
        os.dup2(upper, UPPER)
        wire.send(channel, {"ok": True})
    except OSError as error:
        wire.send(channel, {"error": error.strerror or str(error), "errno": error.errno, "what": "create"})
        os._exit(1)
    k.close_all_but((lifeline, UPPER))
    while "lifeline" in weaken:
        time.sleep(3600)
    os.read(lifeline, 1)
    os._exit(0)


def _loopback() -> None:
    handle = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(
        handle.fileno(), 0x8914, struct.pack("16sH22x", b"lo", 0x1 | 0x40)
    )  # SIOCSIFFLAGS, UP|RUNNING
    handle.close()
