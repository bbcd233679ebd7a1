"""Commands in a box."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from hetero.sandbox.box_state import BoxState
from hetero.sandbox.journal import decide, log_exec
from hetero.sandbox.policy import Decision, Event
from hetero.sandbox.process import Process
from hetero.sandbox.request import arguments, cores_for, exec_request
from hetero.sandbox.result import Result, result_of

UNSET = -1.0


class BoxCommands(BoxState):
    """The part of Sandbox that runs commands."""

    @overload
    def exec(self, command: str | Sequence[str], *, background: Literal[True], **options: Any) -> Process: ...

    @overload
    def exec(
        self, command: str | Sequence[str], *, background: Literal[False] = False, **options: Any
    ) -> Result: ...

    def exec(  # type: ignore[misc]
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = UNSET,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        stdin: bytes | str | None = None,
        background: bool = False,
        tty: int = -1,
    ) -> Result | Process:
        """Run a command: a list of arguments, or a string for bash.

        When it ends, everything that it started ends with it.

        Args:
            timeout: seconds; by default the policy's wall_s; None for no deadline.
            env: added to the policy's environment.
            stdin: its input; none by default (a background command's can be written later if it is b"").
            background: return a Process at once, whose output can be read as it comes.
            tty: descriptor of a terminal for its streams.

        A deadline or another limit is no exception: see Result.reason. Raises PolicyDenied, SandboxDead,
        SandboxInfraError.
        """
        argv = arguments(command)
        limit = self.policy.limits.wall_s if timeout == UNSET else timeout
        decision = decide(self.policy, Event("exec", self.id, {"argv": argv, "cwd": cwd}), self._log)
        given = stdin.encode() if isinstance(stdin, str) else stdin
        return self._launch(
            argv, decision, cwd=cwd, env=env or {}, stdin=given, timeout=limit, background=background, tty=tty
        )

    def _launch(
        self,
        argv: list[str],
        decision: Decision,
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        timeout: float | None,
        background: bool,
        tty: int = -1,
        warm: str = "",
    ) -> Result | Process:
        """Start what was decided on. `warm`: key of a template whose interpreter is the command."""
        request = exec_request(
            argv,
            self.policy,
            self._weaken,
            env={**dict(self.image.env), **dict(self.policy.env), **env},
            cwd=cwd,
            stdin=stdin,
            timeout=timeout,
            stream=background,
            hard_memory=self.isolation.limits["memory"] == "hard",
            cores=cores_for(self.policy, self.id, self.isolation.tier == "ns+cgroup"),
        )
        with self._lock:
            self._need("live")
            files = (tty,) if tty >= 0 else ()
            channel, host = self._open(request, files, warm)
            process = Process(channel, host, self._finisher(argv, cwd, decision), timeout)
            self._running.add(process)
        if background:
            threading.Thread(target=process.collect, name=f"sandbox-{self.id}", daemon=True).start()
            return process
        process.collect()
        return process.wait()

    def _finisher(self, argv: list[str], cwd: str, decision: Any) -> Any:
        def finished(process: Process, frame: dict[str, Any] | None) -> Result | None:
            with self._lock:
                self._running.discard(process)
            result = None
            if frame is not None:
                killed = frame["signal"] == 9 and not frame["reason"] and self.isolation.tier == "ns+cgroup"
                result = result_of(frame, self._oom_kills() if killed and self.state == "live" else 0)
            log_exec(self._log, self.policy, argv, cwd, decision, result, frame)
            return result

        return finished
