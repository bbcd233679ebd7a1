"""Judging a tree by checks and runs: in fresh forks, with programs that the agent has not touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero.errors import ArgumentError
from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.image import Image
from hetero.sandbox.policy import Policy
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.shell_grade import Run, grade_shell

Make = Callable[..., Sandbox]


def test_checks_see_the_tree_and_nothing_that_runs(box: Sandbox) -> None:
    box.write_file("f", "good")
    loop = "while true; do echo bad > f; sleep 0.01; echo good > f; done"
    writer = box.exec(f"echo begun; {loop}", background=True)
    assert next(iter(writer)) == ("stdout", b"begun\n")
    check = "for i in 1 2 3; do sleep 0.05; cat f; done; pgrep -f 'sleep 0.0[1]' && exit 1; true"
    verdict = grade_shell(box, check)
    assert verdict.passed, verdict
    assert writer.wait().reason == "closed"
    assert box.exec("cat f").ok
    failed = grade_shell(box, "echo 'no such thing' >&2; exit 4", [Run("cat f", stdout="else")])
    assert failed.outcomes[0] == "failed: exit status 4: no such thing"
    assert failed.outcomes[1].startswith("failed: said")
    assert not failed.passed


def test_what_the_agent_planted_does_not_reach_a_check(box: Sandbox) -> None:
    planted = """
    mkdir -p bin; printf '#!/bin/sh\\nexit 0\\n' > bin/grep; chmod +x bin/grep
    for f in .bashrc .bash_profile .profile .bash_env; do echo 'exit 0' > ~/$f; done
    echo 'raise SystemExit(0)' > json.py; echo 'import os; os._exit(0)' > sitecustomize.py
    mkdir -p ~/.local/lib/python3.11/site-packages
    echo 'import os; os._exit(0)' > ~/.local/lib/python3.11/site-packages/usercustomize.py
    """
    assert box.exec(planted, env={"BASH_ENV": "/home/agent/.bash_env"}).exit is not None
    check = "export PATH; echo x | grep y && exit 0; python3 -c 'import json; assert json.dumps(1) == \"2\"'"
    verdict = grade_shell(box, check)
    assert not verdict.passed
    assert any("sitecustomize.py" in flag for flag in verdict.flags)


def test_each_test_has_a_fork_of_its_own(box: Sandbox) -> None:
    runs = [Run("echo 1 >> f; cat f", stdout="1"), Run("echo 1 >> f; cat f", stdout="1")]
    verdict = grade_shell(box, "[ ! -e f ]", runs)
    assert verdict.outcomes == ("passed", "passed", "passed")
    assert box.exec("ls").stdout == ""


def test_limits_end_a_test_as_a_failure(box: Sandbox) -> None:
    verdict = grade_shell(box, "sleep 60", [Run("sleep 60")], timeout=0.3)
    assert verdict.outcomes == ("failed: timeout", "failed: timeout")


def test_a_check_needs_programs_that_were_out_of_reach(make_box: Make) -> None:
    for writable in ("/", "/usr/local", "/etc"):
        box = make_box(policy=Policy(writable=(writable, "/workspace", "/tmp")))
        with pytest.raises(ArgumentError, match="could have replaced"):
            grade_shell(box, "true")
        assert grade_shell(box, runs=[Run("echo hi", stdout="hi")]).passed
    with pytest.raises(ArgumentError, match="everything would pass"):
        grade_shell(make_box())


def test_an_image_without_bash_is_no_verdict(make_box: Make) -> None:
    box = make_box(image=Image(host=False))
    with pytest.raises(SandboxInfraError, match="cannot be run"):
        grade_shell(box, runs=[Run("true")])


def test_grading_works_in_a_tier_without_a_root_of_its_own() -> None:
    with Sandbox.create(tier="landlock", min_isolation="landlock") as box:
        box.write_file("f", "4")
        assert grade_shell(box, '[ "$(cat f)" = 4 ]', [Run("cat f", stdout="4")]).passed
        assert not grade_shell(box, '[ "$(cat f)" = 5 ]').passed
