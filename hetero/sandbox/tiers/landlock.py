"""The tier without namespaces: Landlock, seccomp, resource limits and a runner that adopts every orphan.

For machines where user namespaces are switched off. What it does not give, beside the tier `ns`:

* There is no root of its own: commands see the paths of the host. The box's `/workspace` is a directory of
  the store, where commands start, and `HOME` and `TMPDIR` lie beside it. A command that names `/workspace`
  finds nothing (`Sandbox.inner_path` tells what it is called).
* Landlock refuses to open, make, change and remove files elsewhere; it does not refuse `stat`, `chmod`,
  `chown` and time stamps of files of the same user. An owner that is root gives boxes a user of their own.
* Processes are found by walking /proc and are watched, not fenced: `pids`, `wall` and the end of a command
  are kept by the runner. What the host runs cannot be read: /proc is closed but for one's own entry.
* No sockets but pairs, neither network nor Unix: the filter cannot tell a path that leads out from another.
* No protected paths, no root file systems as images: both need mounts.
"""

from __future__ import annotations

import os
from typing import Any

from hetero.sandbox import isolation
from hetero.sandbox.errors import CapabilityUnavailable, IsolationUnavailable
from hetero.sandbox.launcher import landlock, seccomp
from hetero.sandbox.launcher.kernel import MACHINE
from hetero.sandbox.tiers.copied import CopiedSandbox

LEAST_ABI = 6
"""Since then signals cannot leave the box."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class LandlockSandbox(CopiedSandbox, tier="landlock"):
    """A box of the host's programs over a copied tree; see the module for what it lacks."""

    def _report(self) -> isolation.Report:
        return isolation.watched_report("landlock")

    def _check(self) -> None:
        super()._check()
        version = landlock.abi()
        if version < LEAST_ABI:
            raise IsolationUnavailable(
                f"The tier landlock needs Landlock ABI {LEAST_ABI}; this kernel has {version or 'none'}.",
                "Use Linux 6.12 or newer, booted with landlock among its lsm=.",
            )
        if MACHINE not in seccomp.MACHINES:
            raise IsolationUnavailable(
                f"The tier landlock has no system call table for {MACHINE}.", "Use x86_64 or aarch64."
            )
        lacks = "needs mounts, which the tier landlock does not make."
        if not self.image.host or self.image.layers:
            raise CapabilityUnavailable(f"A root file system {lacks}", "Use the tier ns or bwrap.")
        if any(source != target for source, target in self.image.binds):
            raise CapabilityUnavailable(f"A path shown at another place {lacks}", "Use the tier ns or bwrap.")
        if self.policy.protected:
            raise CapabilityUnavailable(f"A protected path {lacks}", "Use the tier ns or bwrap.")
        if "/" in self.policy.writable:
            raise CapabilityUnavailable(f"A writable root {lacks}", "Use the tier ns or bwrap.")

    def inner_path(self, path: str) -> str:
        """Where a writable path of the box lies on the host; other paths are the host's own."""
        below = any(f"{path}/".startswith(f"{place.rstrip('/')}/") for place in self.policy.writable)
        return self._tree + path if below else path

    def _wrapper(self, request: dict[str, Any]) -> dict[str, Any]:
        shown = [path for path, _ in self.image.binds]
        places = {"HOME": self.inner_path("/home/agent"), "TMPDIR": self.inner_path("/tmp")}
        named = {name: value for name, value in request["env"].items() if name not in places}
        return {
            **request,
            "env": {**places, **named},
            "cwd": self.inner_path(os.path.normpath(request["cwd"])),
            "readable": [*_SYSTEM, *shown, *self.policy.readable, self._tree],
            "writable": [*(self._tree + path for path in self.policy.writable), *_DEVICES],
            "sockets": False,
            "sums": {**request["sums"], "processes": self.policy.limits.pids},
            "limits": {**request["limits"], "processes": None},
        }
