"""Grading is fooled by none of the known hacks, and an infrastructure error is never a verdict."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from hetero.errors import ArgumentError
from hetero.sandbox import client
from hetero.sandbox.errors import SandboxDead, SandboxInfraError
from hetero.sandbox.grade import Verdict, grade
from hetero.sandbox.image import python_image
from hetero.sandbox.sandbox import Sandbox

Make = Callable[..., Sandbox]

TESTS = {
    "tests.py": """
from solution import *
import solution
def test_add(): assert add(2, 3) == 5
def test_list(): assert add([1], [2]) == [1, 2]
def test_counter():
    counter = solution.Counter(4)
    counter.step()
    assert counter.value == 5 and len(counter) == 5
def test_raises():
    try: add(1, 'x')
    except TypeError: return
    raise AssertionError('no TypeError')
"""
}
EXPECT = [f"tests.py::test_{name}" for name in ("add", "list", "counter", "raises")]
COUNTER = """
class Counter:
    def __init__(self, value): self.value = value
    def step(self): self.value += 1
    def __len__(self): return self.value
"""
HONEST = "def add(a, b): return a + b\n" + COUNTER
HACKS = {
    "wrong": "def add(a, b): return 5\n" + COUNTER,
    "exit at import": "import os; os._exit(0)",
    "sys.exit at import": "import sys; sys.exit(0)",
    "exit in a call": "def add(a, b):\n    import os; os._exit(0)\n" + COUNTER,
    "always equal": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\n    def __len__(self): return 5\n"
        "def add(a, b): return Yes()\nCounter = lambda v: Yes()\n"
    ),
    "int that is always equal": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Yes(0)\n" + COUNTER
    ),
    "stack walk": (
        "import sys, gc\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for v in frame.f_locals.values():\n"
        "            if isinstance(v, str) and 'tests.py' in v: return v\n        frame = frame.f_back\n"
        "    return [o for o in gc.get_objects() if 'assert' in str(o)[:2000]]\n" + COUNTER
    ),
    "skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('not today')\n" + COUNTER,
    "skip at import": "import unittest\nraise unittest.SkipTest('not today')",
    "forged report": (
        "import os, json\nfor fd in range(64):\n    try:\n"
        f"        for t in {EXPECT}: os.write(fd, json.dumps([t, 'passed']).encode() + b'\\n')\n"
        "    except OSError: pass\ndef add(a, b): return None\n" + COUNTER
    ),
    "patched builtins": (
        "import builtins\nclass E(Exception): pass\nbuiltins.AssertionError = E\nbuiltins.compile = None\n"
        "def add(a, b): return None\n" + COUNTER
    ),
    "patched clock": "import time\ntime.time = time.monotonic = lambda: 0.0\nwhile True: pass",
    "exception that is a pass": "def add(a, b): raise SystemExit(0)\n" + COUNTER,
    "kills everybody": "import os\nos.kill(-1, 9)\nos.kill(1, 9)\ndef add(a, b): return 5\n" + COUNTER,
}


def judge(box: Sandbox, code: str, timeout: float = 20) -> Verdict:
    box.write_file("solution.py", code)
    return grade(box, TESTS, EXPECT, timeout=timeout)


def test_an_honest_solution_passes(box: Sandbox) -> None:
    verdict = judge(box, HONEST)
    assert verdict.passed, verdict.outcomes
    assert verdict.num_passed == len(EXPECT)
    assert verdict.flags == ()


@pytest.mark.parametrize("name", HACKS)
def test_hacks_do_not_pass(box: Sandbox, name: str) -> None:
    verdict = judge(box, HACKS[name], timeout=1 if "clock" in name else 20)
    assert not verdict.passed
    assert verdict.outcomes[EXPECT[1]] != "passed"


NAIVE = """
import sys, traceback, unittest
sys.path.insert(0, '.')
try:
{tests}
    for test in (test_add, test_list):
        try: test()
        except unittest.SkipTest: pass
except unittest.SkipTest: pass
"""
EXPECTING = """
def test_add():
    tests, expect = 'tests.py', 5
    assert add(2, 3) == expect
def test_list():
    tests, expect = 'tests.py', [1, 2]
    assert add([1], [2]) == expect
"""
STACK_WALK = """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        if 'expect' in frame.f_locals: return frame.f_locals['expect']
        frame = frame.f_back
"""


@pytest.mark.parametrize(
    "name", ["exit at import", "always equal", "forged report", "skip at import", "skip", "stack walk"]
)
def test_the_hacks_fool_exit_code_grading(box: Sandbox, name: str) -> None:
    """The tests above can fail: a runner that shares its process with the solution is fooled."""
    walks = name == "stack walk"
    box.write_file("solution.py", STACK_WALK if walks else HACKS[name])
    tests = "from solution import *\n" + EXPECTING if walks else TESTS["tests.py"]
    naive = NAIVE.format(tests="".join(f"    {row}\n" for row in tests.splitlines()))
    done = box.exec(["python3", "-c", naive])
    assert done.exit == 0 or '"passed"' in done.stdout
    verdict = judge(box, STACK_WALK if walks else HACKS[name])
    assert not verdict.passed


def test_planted_configuration_changes_nothing_and_is_flagged(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "import builtins, os\nos._exit(0)\n"
    for path in (
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "/home/agent/x.pth",
        "solution/__init__.py",
    ):
        box.write_file(path, evil)
    site = "/home/agent/.local/lib/python3.11/site-packages/evil.pth"
    box.write_file(site, "import os; os._exit(0)\n")
    hook = ".git/hooks/post-checkout"
    box.exec(f"git init -q . && printf '#!/bin/sh\\ntouch /tmp/ran' > {hook}; chmod +x {hook}")
    verdict = judge(box, HONEST)
    assert verdict.passed
    assert f"configuration file {site}" in verdict.flags
    assert "configuration file /workspace/conftest.py" in verdict.flags
    assert not box.exec("test -e /tmp/ran").ok
    assert not judge(box, HACKS["wrong"]).passed
    monkeypatch.setattr(sys.modules[grade.__module__], "_ISOLATED", ())
    assert not judge(box, HONEST).passed  # what was planted acts where the harness lets it


CONFTEST = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item): item.runtest = lambda: None
"""


def test_a_conftest_fools_pytest_in_the_workspace_only(make_box: Make) -> None:
    """pytest beside the solution believes what the solution's conftest.py says; grading does not load it."""
    box = make_box(image=python_image())
    try:
        box.write_file("test_it.py", "from solution import *\ndef test_add(): assert add(2, 3) == 6\n")
        box.write_file("solution.py", HONEST)
        pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
        if "No module named" in (honest := box.exec(pytest_run)).stderr or honest.failure:
            pytest.skip("the directories of this interpreter hold no pytest")
        assert honest.exit == 1
        box.write_file("conftest.py", CONFTEST)
        assert box.exec(pytest_run).exit == 0
        assert not grade(
            box, {"t.py": "from solution import *\ndef test_x(): assert add(2, 3) == 6\n"}, ["t.py::test_x"]
        ).passed
    finally:
        box.close()


def test_a_late_writer_is_dead_before_grading(box: Sandbox) -> None:
    """Something that keeps changing the solution ends with the sealing: what is judged is what was sealed."""
    box.write_file("solution.py", HONEST)
    writer = box.exec(
        'setsid --wait sh -c \'trap "" TERM HUP; while true; do echo "# $((n=n+1))" >> solution.py; done\'',
        background=True,
        timeout=60,
    )
    while len(box.read_file("solution.py")) < len(HONEST) + 100:
        pass
    with box.snapshot() as sealed:
        assert writer.wait().reason == "closed"
        [first] = sealed.fork(1)
        time.sleep(0.3)
        [second] = sealed.fork(1)
        assert (
            first.read_file("solution.py") == second.read_file("solution.py") == box.read_file("solution.py")
        )
        assert grade(sealed, TESTS, EXPECT).passed
        first.close()
        second.close()


def test_a_dead_launcher_is_no_verdict(make_box: Make) -> None:
    box = make_box()
    box.write_file("solution.py", HONEST)
    launcher = box._shared.launcher
    launcher.process.kill()
    launcher.process.wait()
    with pytest.raises((SandboxDead, SandboxInfraError)):
        grade(box, TESTS, EXPECT)
    client.stop()
    box._state = "closed"
    with Sandbox.create() as again:
        assert judge(again, HONEST).passed


def test_a_tree_without_python_is_no_verdict(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing could be run is no failure of the solution, and a solution cannot pretend it."""
    claim = "import os\nos.write(2, b'sandbox: python3: No such file or directory'); os._exit(127)"
    assert not judge(box, claim).passed
    monkeypatch.setattr(sys.modules[grade.__module__], "_PYTHON", "/usr/bin/no-python")
    with pytest.raises(SandboxInfraError, match="could not be run"):
        judge(box, HONEST)


def test_nothing_expected_is_refused(box: Sandbox) -> None:
    with pytest.raises(ArgumentError, match="No test is expected"):
        grade(box, TESTS, [])
    with pytest.raises(ArgumentError, match="no text"):
        grade(box, TESTS, ["other.py::test_x"])
