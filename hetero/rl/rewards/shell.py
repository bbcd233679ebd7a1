"""The reward for shell tasks. The standard library and `hetero.sandbox` only, as for all that runs code."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.rl.rewards.answers import words_of
from hetero.rl.rewards.programs import code_of, prepare
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.shell_grade import Run, ShellVerdict, grade_shell

__all__ = ["prepare", "shell_task"]
_POLICY = Policy(limits=Limits(wall_s=30, memory_mb=512, pids=64, disk_mb=64))
_LANGUAGES = ("bash", "sh", "shell", "console", "")


def shell_task(
    completions: Sequence[Any],
    setup: Sequence[str | None] | None = None,
    check: Sequence[str | None] | None = None,
    runs: Sequence[Sequence[Mapping[str, Any]] | None] | None = None,
    solution: Sequence[str | None] | None = None,
    timeout: float = 20.0,
    partial: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Whether the last shell block of the reply does what the task wants. It runs in /workspace of a new box
    that the script `setup` has prepared; then the tree is sealed, and `check` (a script, exit status 0) and
    `runs` (objects with command, stdin, stdout, exit) judge it in fresh boxes: see grade_shell.

    `partial` gives the share of passed tests. None for a row without tests. With a column `solution` every
    task is first tried out: one that its own solution fails, or that passes when nothing is done, raises
    ValueError.
    """
    if check is None and runs is None:
        raise ValueError("shell_task needs the column check, or the column runs, or both")
    rewards: list[float | None] = []
    for index, completion in enumerate(completions):
        task = [_at(setup, index) or "", _at(check, index) or "", list(_at(runs, index) or ())]
        if not task[1] and not task[2]:
            rewards.append(None)
            continue
        gold = _at(solution, index)
        if gold is not None:
            _try_out(json.dumps(task), gold, timeout)
        script = code_of(words_of(completion), _LANGUAGES)
        verdict = _judged(task, script, timeout)
        share = verdict.num_passed / len(verdict.outcomes)
        rewards.append(share if partial else float(verdict.passed))
    return rewards


def _at(column: Sequence[Any] | None, index: int) -> Any:
    return None if column is None else column[index]


def _judged(task: list[Any], script: str, timeout: float) -> ShellVerdict:
    setup, check, runs = task
    with Sandbox.create(policy=_POLICY) as box:
        if setup:
            made = box.exec(setup, timeout=timeout)
            if not made.ok:
                raise ValueError(f"the setup fails with status {made.status}: {made.stderr.strip()[-300:]}")
        if script.strip():
            box.exec(script, timeout=timeout)  # its own exit status is no part of the task
        return grade_shell(box, check, [Run(**run) for run in runs], timeout=timeout)


@functools.lru_cache(maxsize=4096)
def _try_out(task: str, solution: str, timeout: float) -> None:
    """Raise ValueError unless the task's solution passes it and doing nothing does not."""
    right = _judged(json.loads(task), solution, timeout)
    if not right.passed:
        raise ValueError(f"the task's own solution {solution!r} does not pass it: {list(right.outcomes)}")
    if _judged(json.loads(task), "", timeout).passed:
        raise ValueError(f"the task passes when nothing is done, so it tells nothing: {task[:300]}")
