"""Grading: tests run in one fresh box, the solution in another; they exchange messages through this process.

The solution's box is forked from the sealed tree, so no process of the agent lives. Tests, expected values
and the verdict are never in it: leaving early, skipping, equal-to-everything objects, walks up the stack,
patched frameworks and planted configuration files find nothing to act on. The verdict comes on the tester's
own pipe.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.errors import ArgumentError
from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.inside.values import line
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.process import Process
from hetero.sandbox.programs import ANSWER, TESTER
from hetero.sandbox.result import Result
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot

_PYTHON = "/usr/bin/python3"
_ISOLATED = ("-I",)
"""No PYTHON* variable, no user's site directory, nothing from the working directory."""
_SUSPICIOUS = ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "tox.ini", "setup.cfg")
_SLACK_S = 5.0
_TESTER_POLICY = Policy(limits=Limits(wall_s=None))


@dataclass(frozen=True)
class Verdict:
    """What grading found.

    Attributes:
        passed: every expected test ran and passed.
        outcomes: expected test -> "passed", "failed: ..." or "was not run".
        flags: signs of gaming, such as files that configure Python or pytest. They do not change `passed`.
        solution: how the solution's process ended: a deadline or another limit is the solution's failure.
    """

    passed: bool
    outcomes: Mapping[str, str]
    flags: tuple[str, ...]
    solution: Result

    @property
    def num_passed(self) -> int:
        """Tests that passed."""
        return sum(outcome == "passed" for outcome in self.outcomes.values())


def grade(
    source: Snapshot[Sandbox] | Sandbox,
    tests: Mapping[str, str],
    expect: Sequence[str],
    *,
    module: str = "/workspace/solution.py",
    timeout: float = 30.0,
) -> Verdict:
    """Whether the Python file `module` of a box passes tests.

    Args:
        source: the box (it is sealed first, which ends its commands) or a snapshot of it.
        tests: file name -> text; `import solution` there means `module`.
        expect: the tests that have to pass, as "file.py::function".
        timeout: seconds for all tests together.

    Raises ArgumentError for tests that cannot be meant; SandboxInfraError or SandboxDead when a box failed:
    mask the sample then, never score it.
    """
    if not expect:
        raise ArgumentError("No test is expected, so everything would pass. Name tests in `expect`.")
    unknown = [test for test in expect if test.partition("::")[0] not in tests]
    if unknown:
        raise ArgumentError(
            f"There is no text for the expected test {unknown[0]}; files are {', '.join(tests)}."
        )
    with fresh_fork(source) as box, _tester_box(box) as quiet:
        flags = suspicious_files(box)
        solution = box.exec(
            [_PYTHON, *_ISOLATED, "-c", ANSWER, box.inner_path(module)],
            stdin=b"",
            background=True,
            timeout=timeout,
        )
        tester = quiet.exec(
            [_PYTHON, *_ISOLATED, "-c", TESTER],
            stdin=line([dict(tests), list(expect)]),
            background=True,
            timeout=timeout + _SLACK_S,
        )
        report = _relay(tester, solution)
        judged = tester.wait()
        solution.kill()
        ended = solution.wait()
    if failure := judged.failure or ended.failure:
        raise SandboxInfraError(f"The tests could not be run: {failure}.", "Use an image that has python3.")
    outcomes = {test: report.get(test, "was not run") for test in expect}
    return Verdict(all(o == "passed" for o in outcomes.values()), outcomes, flags, ended)


def _tester_box(box: Sandbox) -> Sandbox:
    """A box for the tests: held in like the solution's, but never away from this machine."""
    tier = "ns" if box.tier == "microvm" else box.tier
    return Sandbox.create(policy=_TESTER_POLICY, tier=tier, min_isolation=tier)


def fresh_fork(source: Snapshot[Sandbox] | Sandbox) -> Sandbox:
    """A new box over the sealed tree, where nothing of the agent runs and nothing can be reached."""
    if isinstance(source, Snapshot):
        offline = replace(source.source.policy, network=None)
        return source.fork(1, policy=offline)[0]
    with source.snapshot() as sealed:
        return fresh_fork(sealed)


def _relay(tester: Process, solution: Process) -> dict[str, str]:
    """Carry questions and answers until the tester has ended; its report."""

    def answers() -> None:
        for name, data in solution:
            if name == "stdout":
                tester.write(data)
        tester.write(b"", end=True)

    carrier = threading.Thread(target=answers, name="sandbox-answers", daemon=True)
    carrier.start()
    told = bytearray()
    for name, data in tester:
        if name == "stdout":
            solution.write(data)
        else:
            told += data
    rows = [json.loads(row) for row in bytes(told).splitlines() if row.startswith(b"[")]
    return {str(test): str(outcome) for test, outcome in rows}


def suspicious_files(box: Sandbox) -> tuple[str, ...]:
    """Files in the writable places whose names configure Python or pytest: worth a look, no proof."""
    names = [part for name in (*_SUSPICIOUS, "*.pth") for part in ("-o", "-name", name)][1:]
    places = [box.inner_path(path) for path in ("/workspace", "/home/agent")]
    found = box.exec(["find", *places, "-xdev", "(", *names, ")", "-print"], timeout=20)
    return tuple(f"configuration file {path}" for path in sorted(found.stdout.splitlines()))
