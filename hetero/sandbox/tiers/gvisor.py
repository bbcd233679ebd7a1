"""The tier gvisor: commands run on gVisor's own kernel (runsc), a container per command over the box's tree.

Dearer to start than the others (hundreds of milliseconds), and the only local tier whose commands do not talk
to the host's kernel. Memory, processes and disk are watched; there is no network. Inside, the user is number
0 without capabilities: a rootless runsc maps one user only.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

from hetero.sandbox import isolation
from hetero.sandbox.image import host_binds
from hetero.sandbox.tiers.bwrap import ProvedSandbox, program

_FIX = "Install runsc: https://gvisor.dev/docs/user_guide/install."
_OWN_MB = 512
"""What runsc itself may take beside the command's memory: from outside the two cannot be told apart."""
_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")
_RLIMITS = {"cpu": "RLIMIT_CPU", "file": "RLIMIT_FSIZE", "files": "RLIMIT_NOFILE", "core": "RLIMIT_CORE"}


class GvisorSandbox(ProvedSandbox, tier="gvisor"):
    """A box whose commands run in gVisor."""

    def _report(self) -> isolation.Report:
        return isolation.watched_report("gvisor", wall="hard")

    def _check(self) -> None:
        super()._check()
        program("runsc", "gvisor", _FIX)

    def _wrapper(self, request: dict[str, Any]) -> dict[str, Any]:
        name = secrets.token_hex(6)
        bundle = f"{self._directory}/g{name}"
        log = f"{bundle}/log"
        flags = [
            "--rootless",
            "--network=none",
            "--ignore-cgroups",
            "--root",
            f"{bundle}/state",
            "--log",
            log,
        ]
        platform = os.environ.get("HETERO_GVISOR_PLATFORM", "ptrace")
        sums = request["sums"]
        memory = sums["memory"] and sums["memory"] + (_OWN_MB << 20)
        return {
            **request,
            "sums": {**sums, "memory": memory},
            "wrapper": {
                "program": program("runsc", "gvisor", _FIX),
                "options": [*flags, f"--platform={platform}", "run", "--bundle", bundle, name],
                "bundle": bundle,
                "log": log,
                "config": json.dumps(self.config(request)),
            },
        }

    def config(self, request: dict[str, Any]) -> dict[str, Any]:
        """The OCI runtime specification of one command."""
        policy, tree = self.policy, self._tree
        read = ["ro", "rbind", "nosuid", "nodev"]
        binds = [(tree + path, path, ["rw", "rbind"]) for path in sorted(policy.writable) if path != "/"]
        binds += [(source, target, read) for source, target in host_binds(self.image)]
        binds += [(path, path, read) for path in policy.readable]
        binds += [(tree + path, path, read) for path in policy.protected]
        limits = {name: value for name, value in request["limits"].items() if value is not None}
        return {
            "ociVersion": "1.0.0",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": request["argv"],
                "env": [f"{name}={value}" for name, value in request["env"].items()],
                "cwd": request["cwd"],
                "capabilities": {name: [] for name in _SETS},
                "noNewPrivileges": True,
                "rlimits": [
                    {"type": kind, "soft": limits[name], "hard": limits[name]}
                    for name, kind in _RLIMITS.items()
                    if name in limits
                ],
            },
            "root": {"path": tree, "readonly": "/" not in policy.writable},
            "hostname": "sandbox",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                *(
                    {"destination": target, "type": "bind", "source": source, "options": options}
                    for source, target, options in binds
                ),
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }
