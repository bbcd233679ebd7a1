"""Python code in a box, run by one interpreter whose variables stay between calls."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from hetero.sandbox.box_commands import UNSET, BoxCommands
from hetero.sandbox.journal import decide
from hetero.sandbox.launcher.output import Kept
from hetero.sandbox.policy import ALLOW, Event
from hetero.sandbox.process import Process
from hetero.sandbox.programs import REPL

_STREAMS = ("stdout", "stderr")
_DRAIN_S = 5.0


@dataclass(frozen=True)
class PythonResult:
    """What came of a piece of code.

    Attributes:
        error: name of the exception that ended it; "" for none.
        reason: the limit that ended the interpreter ("timeout", "memory", ...), "exit" when it left by
            itself, "" when it lives. Otherwise its variables are gone, and the next call starts a new one.
        stdout, stderr: what was kept of the output.
        truncated: the middle of the output is left out.
        wall_s: seconds.
    """

    error: str
    reason: str
    stdout: str
    stderr: str
    truncated: bool
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether it ran to its end."""
        return not self.error and not self.reason


class BoxPython(BoxCommands):
    """The part of Sandbox that keeps an interpreter."""

    _repl: Process | None = None
    _repl_lives_in: Path | None = None

    def python(self, code: str, *, timeout: float | None = UNSET) -> PythonResult:
        """Run Python code in /workspace; the value of a last expression is shown, variables and imports stay.

        The interpreter is the box's `python3`, or a fork of the template's. Snapshots with mode "stop", forks
        and hibernation end it; it takes one call at a time. All its output together is held to the
        policy's out_kill.

        Args:
            timeout: seconds, by default the policy's wall_s; None for no deadline. After it the interpreter
                is killed.

        Raises PolicyDenied, SandboxDead, SandboxInfraError.
        """
        limit = self.policy.limits.wall_s if timeout == UNSET else timeout
        event = Event("exec", self.id, {"argv": ["python3", "-c", code], "cwd": "/workspace"})
        decision = decide(self.policy, event, self._log)
        with self._python_lock:
            if self._repl is None or not self._repl.running or self._repl_lives_in != self._directory:
                self._repl, self._repl_lives_in = self._start_repl(), self._directory
            result = _converse(self._repl, code, limit, self.policy.limits.out_keep)
            if result.reason:
                self._repl = None
        flagged = {} if decision.verdict == "allow" else {"decision": decision.verdict}
        self._log(
            "python",
            **self._code_for_journal(code),
            **flagged,
            error=result.error,
            reason=result.reason,
            wall_s=round(result.wall_s, 6),
        )
        return result

    def _start_repl(self) -> Process:
        warm = self.template.key if self.template is not None else ""
        argv = ["python3", "-c", REPL]
        found = self._launch(
            argv, ALLOW, cwd="/workspace", env={}, stdin=b"", timeout=None, background=True, warm=warm
        )
        assert isinstance(found, Process)
        return found


def _converse(process: Process, code: str, timeout: float | None, room: int) -> PythonResult:
    """Send code, and read until its mark is on both streams or the interpreter has ended."""
    mark = secrets.token_hex(16)
    started = time.monotonic()
    process.write(json.dumps([mark, code]).encode() + b"\n")
    held = {name: bytearray() for name in _STREAMS}
    ends: dict[str, int] = {}
    needle = b"\0" + mark.encode()
    reason = ""
    while len(ends) < len(_STREAMS):
        left = None if timeout is None else started + timeout - time.monotonic()
        if left is not None and left <= 0 and not reason:
            reason = "timeout"
            process.kill()
        found = process.read(left if not reason else _DRAIN_S)
        if found is None:
            if process.running and not reason:
                continue
            break
        name, data = found
        searched = max(len(held[name]) - len(needle), 0)
        held[name] += data
        at = held[name].find(needle, searched)
        if at >= 0 and held[name].endswith(b"\n"):
            ends[name] = at
    error = ""
    if len(ends) == len(_STREAMS):
        error = held["stderr"][ends["stderr"] + len(needle) :].decode("utf-8", "replace").strip()
    else:
        ended = process.wait()
        reason = reason or ended.reason or "exit"
    kept = {name: Kept(room) for name in _STREAMS}
    for name, each in kept.items():
        each.add(bytes(held[name][: ends.get(name, len(held[name]))]))
    return PythonResult(
        error,
        reason,
        stdout=kept["stdout"].value().decode("utf-8", "replace"),
        stderr=kept["stderr"].value().decode("utf-8", "replace"),
        truncated=any(each.truncated for each in kept.values()),
        wall_s=time.monotonic() - started,
    )
