"""Tools, as a model calls them."""

from __future__ import annotations

import json

import pytest

from hetero.sandbox.errors import SandboxDead
from hetero.sandbox.patch import PatchError, apply_hunks, parse
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.tools import TOOLS, call_tool, run_script

PATCH = """\
--- a/app.py
+++ b/app.py
@@ -1,3 +1,3 @@
 def f():
-    return 1
+    return 2
 # end
--- /dev/null
+++ b/new/made.txt
@@ -0,0 +1,2 @@
+one
+two
"""


def test_a_scripted_agent_mends_a_program(box: Sandbox) -> None:
    told = run_script(
        box,
        [
            ("write_file", {"path": "app.py", "content": "def f():\n    return 1\n# end\n"}),
            ("bash", {"command": "python3 -c 'import app; assert app.f() == 2'"}),
            ("read_file", {"path": "app.py", "first_line": 2, "num_lines": 1}),
            ("apply_patch", {"patch": PATCH}),
            ("python", {"code": "import app; print(app.f())"}),
            ("read_file", {"path": "new/made.txt"}),
        ],
    )
    assert told[0] == "wrote 28 bytes to app.py"
    assert told[1].endswith("[exit status 1]")
    assert told[2] == "     2     return 1"
    assert told[3] == "patched app.py, new/made.txt"
    assert told[4] == "2"
    assert told[5] == "     1 one\n     2 two"


def test_sql(box: Sandbox) -> None:
    assert "error" not in call_tool(box, "sql", {"statement": "CREATE TABLE t(a, b)"})
    call_tool(box, "sql", {"statement": "INSERT INTO t VALUES (1, 'x'), (2, NULL)"})
    rows = json.loads(call_tool(box, "sql", {"statement": "SELECT * FROM t ORDER BY a"}))
    assert rows == {"columns": ["a", "b"], "rows": [[1, "x"], [2, None]], "more": False}
    assert "syntax error" in call_tool(box, "sql", {"statement": "SELEC"})


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fly", {}, "there is no tool 'fly'"),
        ("bash", "{not json", "not JSON"),
        ("bash", "[1]", "must be an object"),
        ("bash", {}, "missing ['command']"),
        ("bash", {"command": 3}, "command must be a string"),
        ("bash", {"command": "true", "sudo": True}, "unknown ['sudo']"),
        ("read_file", {"path": "nothing"}, "nothing"),
        ("write_file", {"path": "/etc/passwd", "content": "x"}, "not writable"),
        ("apply_patch", {"patch": "no patch"}, "no '+++ path' line"),
        ("apply_patch", {"patch": "+++ b/none\n@@ -1 +1 @@\n-x\n+y"}, "none"),
    ],
)
def test_mistakes_of_the_model_are_told(box: Sandbox, name: str, arguments: object, said: str) -> None:
    told = call_tool(box, name, arguments)  # type: ignore[arg-type]
    assert told.startswith("error:")
    assert said in told


def test_a_dead_box_is_no_tool_result(box: Sandbox) -> None:
    box.close()
    with pytest.raises(SandboxDead):
        call_tool(box, "bash", {"command": "true"})


def test_long_output_keeps_its_ends(box: Sandbox) -> None:
    told = call_tool(box, "bash", {"command": "seq 100000"})
    assert len(told) < 21_000
    assert told.startswith("1\n2\n")
    assert told.endswith("100000")
    assert "[stopped by its limit: timeout]" in call_tool(box, "bash", {"command": "sleep 9", "timeout": 0.1})


def test_schemas_are_what_templates_take() -> None:
    for name, tool in TOOLS.items():
        schema = tool.schema()
        assert schema["function"]["name"] == name
        json.dumps(schema)


def test_hunks_find_their_place() -> None:
    text = "a\nb\nc\na\nb\nd\n"
    [(path, hunks)] = parse("+++ b/f\n@@ -4,2 +4,2 @@\n a\n-b\n+B\n")
    assert (path, apply_hunks(text, hunks, "f")) == ("f", "a\nb\nc\na\nB\nd\n")
    [(_, shifted)] = parse("+++ f\n@@ -40,2 +40,2 @@\n c\n-a\n+A\n")
    assert apply_hunks(text, shifted, "f") == "a\nb\nc\nA\nb\nd\n"
    with pytest.raises(PatchError, match="not in the file"):
        apply_hunks("x\n", hunks, "f")
    with pytest.raises(PatchError, match="ends early"):
        list(parse("+++ f\n@@ -1,2 +1,2 @@\n a\n"))
