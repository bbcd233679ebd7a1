"""The interpreter of a box: its state, its output, its end; and templates that it is forked from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.errors import ArgumentError
from hetero.sandbox import audit
from hetero.sandbox.client import launcher
from hetero.sandbox.context import context
from hetero.sandbox.errors import CapabilityUnavailable, PolicyDenied
from hetero.sandbox.image import Image
from hetero.sandbox.policy import ALLOW, Decision, Limits, Policy, deny
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.template import Template
from hetero.sandbox.tools import call_tool

Make = Callable[..., Sandbox]
WARM = Template(("json", "random", "decimal"))


@pytest.fixture(params=[None, WARM], ids=["cold", "warm"])
def python_box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A box whose interpreter is started in it, and one whose interpreter is forked."""
    with Sandbox.create(template=request.param) as box:
        yield box


def test_state_stays_and_values_are_shown(python_box: Sandbox) -> None:
    first = python_box.python("import math\nx = 20\nprint('out')\nx + 1")
    assert (first.ok, first.stdout, first.stderr) == (True, "out\n21\n", "")
    assert python_box.python("x += 1\nmath.floor(x / 2)").stdout == "10\n"
    assert python_box.python("def f():\n    return x\nNone").stdout == ""
    assert python_box.python("f()").stdout == "21\n"
    assert python_box.python("import sys; print('err', file=sys.stderr)").stderr == "err\n"
    assert python_box.python("__name__").stdout == "'__main__'\n"


def test_errors_are_told_and_the_state_lives(python_box: Sandbox) -> None:
    python_box.python("x = 5")
    failed = python_box.python("y = 1\n1 / 0")
    assert (failed.error, failed.reason, failed.ok) == ("ZeroDivisionError", "", False)
    assert "1 / 0" in failed.stderr
    assert "repl" not in failed.stderr
    assert python_box.python("def f(:").error == "SyntaxError"
    assert python_box.python("raise SystemExit(3)").error == "SystemExit: 3"
    assert python_box.python("import sys; sys.exit()").ok
    assert python_box.python("x + y").stdout == "6\n"
    assert python_box.python("raise KeyboardInterrupt").error == "KeyboardInterrupt"


def test_output_of_children_and_descriptors_belongs_to_its_call(python_box: Sandbox) -> None:
    code = "import os, subprocess\nsubprocess.run(['echo', 'child'])\nos.write(1, b'raw\\n')\nprint('end')"
    assert python_box.python(code).stdout == "child\nraw\nend\n"
    assert python_box.python("print('\\0' + '0' * 32)").stdout == "\0" + "0" * 32 + "\n"
    large = python_box.python("print('x' * 300_000)")
    assert large.truncated
    assert 60_000 < len(large.stdout) < 70_000
    assert python_box.python("1").stdout == "1\n"
    assert python_box.python("os.close(1); os.close(2)").reason == ""
    assert python_box.python("3 + 4").error == ""


def test_a_deadline_ends_the_interpreter(python_box: Sandbox) -> None:
    python_box.python("x = 1")
    started = time.monotonic()
    late = python_box.python("print('begun', flush=True)\nwhile True: pass", timeout=0.5)
    assert (late.reason, late.stdout) == ("timeout", "begun\n")
    assert time.monotonic() - started < 60
    assert python_box.python("'x' in dir()").stdout == "False\n"
    assert python_box.python("import os; os._exit(0)").reason == "exit"
    assert python_box.python("2 + 2").stdout == "4\n"
    flood = python_box.python("while True: print('y' * 1000)", timeout=60)
    assert flood.reason == "output"


def test_it_is_held_in_like_every_command(make_box: Make, journal: Path) -> None:
    policy = Policy(limits=Limits(memory_mb=200))
    with Sandbox.create(policy=policy, template=WARM) as box:
        code = "import os, socket\nprint(sorted(os.listdir('/proc/self/fd')))\nopen('/proc/1/environ').read()"
        assert box.python(code).error == "PermissionError"
        assert box.python("os.getuid(), os.getpid() > 1, os.environ['HOME']").stdout.startswith("(1000, True")
        assert box.python("open('/etc/new', 'w')").error == "OSError"
        assert box.python("socket.create_connection(('192.0.2.1', 80), 2)").error == "OSError"
        assert box.python("socket.socket(40)").error == "OSError"
        assert box.python("import hetero").error == "ModuleNotFoundError"
        assert box.python("print(open('/proc/self/cmdline').read().strip('\\0'))").stdout == "\n"
        assert "memory" in box.python("x = bytearray(700 << 20)").error.lower() + "memory"
        big = box.python("held = []\nwhile True: held.append(b'x' * (1 << 20))", timeout=60)
        assert big.error == "MemoryError" or big.reason
        assert box.python("print(open('/proc/self/status').read())").stdout.count("NoNewPrivs:\t1") == 1
    told = [e for e in audit.read(journal) if e["sandbox"] == box.id and e["event"] == "python"]
    assert len(told) >= 9
    assert told[0]["error"] == "PermissionError"


def test_forks_of_a_template_share_nothing_that_they_change(python_box: Sandbox) -> None:
    python_box.python("import json; json.mark = 1")
    kids = python_box.fork(2)
    drawn = [box.python("import random, json; hasattr(json, 'mark'), random.random()").stdout for box in kids]
    assert len(set(drawn)) == 2
    assert all(each.startswith("(False,") for each in drawn)
    if python_box.template is not None:
        assert all(box.python("import sys; 'decimal' in sys.modules").stdout == "True\n" for box in kids)
    for kid in kids:
        kid.close()


def test_23_warm_forks_draw_their_own_numbers() -> None:
    def drawn(*weaken: str) -> list[str]:
        found = []
        for _ in range(2):
            with Sandbox.create(template=WARM, _weaken=weaken) as box:
                found.append(box.python("import random; random.random()").stdout)
        return found

    first, second = drawn()
    assert first != second
    first, second = drawn("seed")
    assert first == second != ""


def test_pause_snapshot_and_close(python_box: Sandbox) -> None:
    python_box.python("x = 7; open('f', 'w').write('kept')")
    python_box.pause()
    python_box.resume()
    assert python_box.python("x").stdout == "7\n"
    python_box.snapshot().close()
    assert python_box.python("'x' in dir(), open('f').read()").stdout == "(False, 'kept')\n"
    pids = launcher().ask("state", "")["ok"]["boxes"]
    assert python_box.id in pids
    python_box.close()
    assert python_box.id not in launcher().ask("state", "")["ok"]["boxes"]


def test_changed_modules_are_imported_afresh(box: Sandbox) -> None:
    box.write_file("mod.py", "value = 1\n")
    assert box.python("import mod; mod.value").stdout == "1\n"
    box.write_file("mod.py", "value = 22\n")
    assert box.python("import mod; mod.value").stdout == "22\n"


def test_the_callback_may_refuse_code() -> None:
    policy = Policy(on_event=lambda event: deny("no") if "forbidden" in str(event.detail) else _allow())
    with Sandbox.create(policy=policy) as box:
        assert box.python("1").stdout == "1\n"
        with pytest.raises(PolicyDenied):
            box.python("forbidden")
        assert box.python("2").stdout == "2\n"


def _allow() -> Decision:
    return ALLOW


def test_a_template_is_started_once_and_bad_ones_are_refused() -> None:
    for _ in range(2):
        Sandbox.create(template=WARM).close()
    assert list(context()._templates).count(WARM) == 1
    with pytest.raises(CapabilityUnavailable, match="no_such_module: ModuleNotFoundError"):
        Sandbox.create(template=Template(("no_such_module",)))
    with pytest.raises(CapabilityUnavailable, match="could not be started"):
        Sandbox.create(template=Template((), python="/no/python"))
    with pytest.raises(ArgumentError, match="no name of a module"):
        Template(("os; import sys",))
    with pytest.raises(CapabilityUnavailable, match="image"):
        Sandbox.create(Image(host=False), template=WARM)
    with pytest.raises(CapabilityUnavailable, match="tier ns"):
        Sandbox.create(tier="landlock", min_isolation="landlock", template=WARM)


def test_the_tool_keeps_its_variables(box: Sandbox) -> None:
    assert call_tool(box, "python", {"code": "x = 3\nx * 2"}) == "6"
    assert call_tool(box, "python", {"code": "x"}) == "3"
    assert "ZeroDivisionError" in call_tool(box, "python", {"code": "1 / 0"})
    late = call_tool(box, "python", {"code": "while True: pass", "timeout": 0.3})
    assert "variables are gone: timeout" in late
    assert call_tool(box, "python", {"code": "pass"}) == "[no output]"
