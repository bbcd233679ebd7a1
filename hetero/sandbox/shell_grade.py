"""Grades what shell commands left behind: in fresh forks of the sealed tree, where nothing of the agent runs.

Two kinds of test, each in a fork of its own. A `check` is a script of the task's author; it looks at files,
and its exit status, taken from outside, is the verdict. A `Run` starts something that the agent wrote and
compares here what it said: nothing in the box can forge that.

A check must not run what the agent wrote: such a program would share the box, and the user, with its judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.errors import ArgumentError
from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.grade import fresh_fork, suspicious_files
from hetero.sandbox.result import Result
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot

_BASH = ("/usr/bin/bash", "--noprofile", "--norc", "-c")
_ENVIRONMENT = {"HOME": "/", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
"""Programs of a check read no configuration from places where the agent may write."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/usr", "/etc")


@dataclass(frozen=True)
class Run:
    """A command and what it must say.

    Attributes:
        command: for bash, in /workspace.
        stdin: its input.
        stdout: the output that is right, but for white space at its end; None for any.
        exit: the exit status that is right.
    """

    command: str
    stdin: str = ""
    stdout: str | None = None
    exit: int = 0


@dataclass(frozen=True)
class ShellVerdict:
    """What grading found. `outcomes`: one per check or run, in order: "passed" or "failed: ..."."""

    outcomes: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether all passed."""
        return self.num_passed == len(self.outcomes)

    @property
    def num_passed(self) -> int:
        """How many passed."""
        return sum(outcome == "passed" for outcome in self.outcomes)


def grade_shell(
    source: Snapshot[Sandbox] | Sandbox, check: str = "", runs: Sequence[Run] = (), *, timeout: float = 30.0
) -> ShellVerdict:
    """Judge a box's tree.

    Args:
        source: the box (it is sealed first, which ends its commands) or a snapshot of it.
        check: a bash script; it passes with exit status 0. It never lies in the box.
        runs: commands that may start what the agent wrote.
        timeout: seconds for each.

    Raises ArgumentError without any test, or for a check in a tree whose system programs the agent could have
    replaced; SandboxInfraError or SandboxDead when a box failed: mask the sample then.
    """
    if not check and not runs:
        raise ArgumentError("There is neither a check nor a run, so everything would pass.")
    if not isinstance(source, Snapshot):
        with source.snapshot() as sealed:
            return grade_shell(sealed, check, runs, timeout=timeout)
    replaceable = [path for path in source.source.policy.writable if _covers_system(path)]
    if check and replaceable:
        raise ArgumentError(
            f"The agent may write to {replaceable[0]}, so it could have replaced the programs of the check. "
            "Use runs, whose output is compared outside of the box."
        )
    outcomes: list[str] = []
    flags: tuple[str, ...] = ()
    if check:
        with fresh_fork(source) as box:
            flags = suspicious_files(box)
            outcomes.append(_checked(_done(box, [*_BASH, check], "", timeout, _ENVIRONMENT)))
    for run in runs:
        with fresh_fork(source) as box:
            outcomes.append(_compared(run, _done(box, [*_BASH, run.command], run.stdin, timeout, {})))
    return ShellVerdict(tuple(outcomes), flags)


def _covers_system(path: str) -> bool:
    place = path.rstrip("/") + "/"
    return any(f"{each}/".startswith(place) or place.startswith(f"{each}/") for each in _SYSTEM)


def _done(box: Sandbox, argv: list[str], stdin: str, timeout: float, env: dict[str, str]) -> Result:
    done = box.exec(argv, stdin=stdin, timeout=timeout, env=env)
    if done.failure:
        raise SandboxInfraError(f"The grader cannot be run: {done.failure}.", "Use an image that has bash.")
    return done


def _checked(done: Result) -> str:
    if done.ok:
        return "passed"
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"failed: {done.reason or f'exit status {done.status}'}{': ' + last[0][:200] if last else ''}"


def _compared(run: Run, done: Result) -> str:
    if done.reason:
        return f"failed: {done.reason}"
    if done.status != run.exit:
        return f"failed: exit status {done.status} instead of {run.exit}"
    if run.stdout is not None and (done.truncated or done.stdout.rstrip() != run.stdout.rstrip()):
        return f"failed: said {done.stdout[:200]!r}"
    return "passed"
