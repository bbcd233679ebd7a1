"""The tier bwrap: bubblewrap makes the namespaces, one sandbox per command over the box's copied tree.

For machines where an administrator lets /usr/bin/bwrap make user namespaces and nothing else. Memory and
disk are watched; there is no network at all. A signal that ends a command reads as exit status 128 + number.
"""

from __future__ import annotations

import shutil
from typing import Any

from hetero.sandbox import isolation
from hetero.sandbox.errors import IsolationUnavailable
from hetero.sandbox.image import host_binds
from hetero.sandbox.request import exec_request
from hetero.sandbox.tiers.copied import CopiedSandbox

PROBE = "/.no-such-program"
PATIENCE_S = 30.0


def program(name: str, tier: str, fix: str) -> str:
    """Where a program is. Raises IsolationUnavailable."""
    found = shutil.which(name)
    if found is None:
        raise IsolationUnavailable(f"The tier {tier} needs the program {name}, which is not installed.", fix)
    return found


class ProvedSandbox(CopiedSandbox):
    """A tier whose program says only by running whether it can make boxes."""

    def _prove(self) -> None:
        """Start a program that is not there: the answer "no such file" comes from inside a box."""
        request = exec_request(
            [PROBE],
            self.policy,
            (),
            env={},
            cwd="/",
            stdin=None,
            timeout=PATIENCE_S,
            stream=False,
            hard_memory=False,
            cores=set(),
        )
        _, runner = self._open(request, ())
        reply = self._answer(runner)
        why = reply.get("error", "")
        if not why and reply.get("errno") != 2:
            why = reply["stderr"].decode("utf-8", "replace").strip()[-500:] or f"status {reply.get('exit')}"
        if why:
            raise IsolationUnavailable(
                f"The tier {self.tier} cannot make boxes here: {why}.", "Run `hetero sandbox doctor`."
            )


class BubblewrapSandbox(ProvedSandbox, tier="bwrap"):
    """A box whose commands run in bubblewrap."""

    def _report(self) -> isolation.Report:
        return isolation.watched_report("bwrap", wall="hard", pids="hard")

    def _check(self) -> None:
        super()._check()
        program("bwrap", "bwrap", "Install bubblewrap (apt install bubblewrap).")

    def _wrapper(self, request: dict[str, Any]) -> dict[str, Any]:
        found = program("bwrap", "bwrap", "Install bubblewrap (apt install bubblewrap).")
        places = [(target, source) for source, target in self._shown()]
        wrapper = {"program": found, "options": self.options(request["cwd"]), "places": places}
        return {**request, "wrapper": wrapper}

    def _shown(self) -> list[tuple[str, str]]:
        """(host path, path inside) of what is shown read-only."""
        return [*host_binds(self.image), *((path, path) for path in self.policy.readable)]

    def options(self, cwd: str) -> list[str]:
        """bwrap's options for a command that starts in `cwd`."""
        policy, tree = self.policy, self._tree
        uid = str(policy.uid)
        writable = [path for path in sorted(policy.writable) if path != "/"]
        shm = str(min(64, policy.limits.memory_mb or 64) << 20)
        return [
            *("--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox"),
            *("--uid", uid, "--gid", uid),
            *("--bind" if "/" in policy.writable else "--ro-bind", tree, "/"),
            *(part for path in writable for part in ("--bind", tree + path, path)),
            *(part for source, target in self._shown() for part in ("--ro-bind", source, target)),
            *(part for path in policy.protected for part in ("--ro-bind-try", tree + path, path)),
            *("--proc", "/proc", "--dev", "/dev", "--size", shm, "--tmpfs", "/dev/shm"),
            *("--chdir", cwd),
        ]
