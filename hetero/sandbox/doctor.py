"""Finds out what this machine can do by doing it, each check in a process of its own with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from hetero.sandbox import isolation
from hetero.sandbox.store import store_root

_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Check:
    """One thing tried. `needed`: without it there are no sandboxes; else a limit or a tier is lacking."""

    name: str
    ok: bool
    needed: bool
    detail: str
    cause: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine() -> list[Check]:
    """All checks, in the order in which they build on each other."""
    return [
        *(_try(name, code, needed) for name, (code, needed) in _ACTIONS.items()),
        *(_try(f"tier_{tier}", _TIER.format(tier=tier), False) for tier in ("landlock", "bwrap", "gvisor")),
        _try("tier_microvm", _SERVICE, False),
    ]


_KERNEL = "from hetero.sandbox.launcher import kernel as k, landlock, seccomp\n"
_BOX = "from hetero.sandbox.sandbox import Sandbox\nfrom hetero.sandbox.policy import Policy, Limits\n"
_TIER = (
    _BOX + "b = Sandbox.create(tier='{tier}', min_isolation='{tier}'); r = b.exec('echo $((6 * 7))');"
    " assert r.stdout == '42\\n', r; print('ran a command'); b.close()"
)
_SERVICE = (
    "from hetero.sandbox.tiers.service import Service\nservice = Service.from_environment();"
    " service.call('GET', '/v2/sandboxes?limit=1', timeout=10); print(service.url)"
)
_ACTIONS: dict[str, tuple[str, bool]] = {
    "user_namespaces": (_KERNEL + "k.unshare(k.CLONE_NEWUSER); print('made')", True),
    "all_namespaces": (
        _KERNEL + "from hetero.sandbox.launcher.box import NAMESPACES\nk.unshare(NAMESPACES); print('made')",
        True,
    ),
    "seccomp": (_KERNEL + "seccomp.install(seccomp.program()); print('installed')", True),
    "store": (
        "from hetero.sandbox.store import open_run, close_run\nrun = open_run(); print(run.path.parent);"
        " close_run(run)",
        True,
    ),
    "box": (
        _BOX + "b = Sandbox.create(); print(b.exec('id -un').stdout.strip(), b.isolation.tier); b.close()",
        True,
    ),
    "snapshot": (
        _BOX
        + "b = Sandbox.create(); b.write_file('a', 'x'); k = b.fork(1)[0]; assert k.read_file('a') == b'x';"
        " print('forked')",
        True,
    ),
    "no_network": (
        _BOX + "b = Sandbox.create(); r = b.exec(['python3', '-c', 'import socket; s = socket.socket();"
        " s.connect((\"192.0.2.1\", 80))']); assert 'unreachable' in r.stderr, r; print('unreachable')",
        True,
    ),
    "deadline": (
        _BOX + "b = Sandbox.create(); r = b.exec('sleep 50 & sleep 50', timeout=0.2); assert r.timed_out;"
        " print(round(r.wall_s, 3), 's')",
        True,
    ),
    "landlock": (_KERNEL + "n = landlock.abi(); assert n, 'Landlock is off'; print('ABI', n)", False),
    "hard_disk": (
        _BOX + "b = Sandbox.create(policy=Policy(limits=Limits(disk_hard=True, disk_mb=8)));"
        " r = b.exec('head -c 16M /dev/zero > big'); assert 'space' in r.stderr, r; print('ENOSPC at 8 MB')",
        False,
    ),
    "hard_memory": (
        _BOX
        + "b = Sandbox.create(); found = b.isolation.limits['memory']; print(found); assert found == 'hard',"
        " 'memory is watched, not capped: no control group can be made'",
        False,
    ),
}
_OTHER_FIXES = {
    "landlock": (
        "the kernel was built or booted without Landlock",
        "Boot with lsm=landlock,... (Linux 5.13+).",
    ),
    "hard_disk": ("tmpfs lacks user extended attributes", "Use Linux 6.6 or newer."),
    "hard_memory": (
        "control groups are not writable",
        "Run as root; boxes of other users are watched from outside.",
    ),
    "store": ("the store's directory cannot be written", "Set HETERO_STORE to a directory on a local disk."),
    "tier_landlock": (
        "Landlock is off or too old to keep signals in",
        "Use Linux 6.12 or newer, booted with landlock among its lsm= (an optional tier).",
    ),
    "tier_bwrap": (
        "bubblewrap is not installed or may not make user namespaces",
        "apt install bubblewrap; with AppArmor, load its profile bwrap-userns-restrict (an optional tier).",
    ),
    "tier_gvisor": (
        "runsc is not installed or cannot run here",
        "Install gVisor's runsc; HETERO_GVISOR_PLATFORM names its platform (an optional tier).",
    ),
    "tier_microvm": (
        "no service with E2B's API can be used",
        "Set E2B_API_KEY, and E2B_API_URL and E2B_SANDBOX_URL for your own AgentENV (an optional tier).",
    ),
}


def _try(name: str, code: str, needed: bool) -> Check:
    done = _run([sys.executable, "-c", code])
    if isinstance(done, str):
        return Check(name, False, needed, done, "the action hangs", "See the kernel's log.")
    if done.returncode == 0:
        return Check(name, True, needed, done.stdout.strip())
    words = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return Check(name, False, needed, words[0], *_explain(name, words[0]))


def _explain(name: str, words: str) -> tuple[str, str]:
    number = next((n for n in isolation.causes() if f"[Errno {n}]" in words), None)
    if name in _OTHER_FIXES:
        return _OTHER_FIXES[name]
    if number is not None:
        return isolation.causes()[number]
    return "", f"Report this line: {words}"


def _run(argv: list[str]) -> subprocess.CompletedProcess[str] | str:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "HETERO_STORE": str(store_root())},
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_DEADLINE_S:.0f} s"
    except OSError as error:
        return str(error)
