"""Rewards that run what the model wrote, in sandboxes. The standard library and `hetero.sandbox` only.

A completion that fails its tests is 0.0. A sandbox that fails raises, and the reward pool then masks the
sample and counts it: it is never scored 0.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.rl.rewards.answers import words_of
from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.grade import grade
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox

_BLOCK = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_POLICY = Policy(limits=Limits(wall_s=30, memory_mb=512, pids=64, disk_mb=64))
_QUERIES = """
import json, sqlite3, sys
schema, queries, most = json.load(sys.stdin)
answers = []
for query in queries:
    base = sqlite3.connect(":memory:")
    base.executescript(schema)
    base.execute("PRAGMA query_only = 1")
    try:
        answers.append({"rows": [list(map(repr, row)) for row in base.execute(query).fetchmany(most)]})
    except (sqlite3.Error, sqlite3.Warning) as error:
        answers.append({"error": str(error)})
print(json.dumps(answers))
"""


def prepare() -> None:
    """Start the launcher of sandboxes and see that one can be made. Raises SandboxError."""
    Sandbox.create(policy=_POLICY).close()


def python_tests(
    completions: Sequence[Any],
    test_list: Sequence[Sequence[str]] | None = None,
    test: Sequence[str] | None = None,
    entry_point: Sequence[str] | None = None,
    test_setup_code: Sequence[str] | None = None,
    timeout: float = 10.0,
    partial: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Whether the last Python block of the reply passes hidden tests: MBPP's column `test_list` (assert
    statements) or HumanEval's `test` (defines check(candidate)) and `entry_point`.

    The tests run in another box than the solution and reach it by messages: there is nothing to read or
    forge. `partial` gives the share of passed tests instead of all or nothing. None for a row without tests.
    """
    rewards: list[float | None] = []
    for index, completion in enumerate(completions):
        setup = (test_setup_code[index] if test_setup_code else "") or ""
        if test_list is not None:
            tests = mbpp_tests(test_list[index], setup)
        elif test is not None and entry_point is not None:
            tests = humaneval_tests(test[index], entry_point[index])
        else:
            raise ValueError("python_tests needs the column test_list, or the columns test and entry_point")
        rewards.append(_pass_rate(completion, tests, timeout, partial) if tests else None)
    return rewards


def mbpp_tests(asserts: Sequence[str], setup: str = "") -> str:
    """One test function per assert statement."""
    if not asserts:
        return ""
    functions = [f"def test_{n}():\n" + _indented(each) for n, each in enumerate(asserts)]
    return "from solution import *\n" + setup + "\n" + "\n".join(functions)


def humaneval_tests(test: str, entry_point: str) -> str:
    """One test function that calls the task's check()."""
    call = f"check(getattr(solution, {entry_point!r}))"
    return f"import solution\nfrom solution import *\n{test}\ndef test_0():\n    {call}\n" if test else ""


def _indented(text: str) -> str:
    return "".join(f"    {row}\n" for row in text.strip().splitlines())


def _pass_rate(completion: Any, tests: str, timeout: float, partial: bool) -> float:
    code = code_of(words_of(completion), ("python", "py", "python3", ""))
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    names = [f"t.py::{name}" for name in re.findall(r"^def (test_\d+)\(", tests, re.MULTILINE)]
    with Sandbox.create(policy=_POLICY) as box:
        box.write_file("solution.py", code)
        verdict = grade(box, {"t.py": tests}, names, timeout=timeout)
    return verdict.num_passed / len(names) if partial else float(verdict.passed)


def code_of(text: str, languages: tuple[str, ...]) -> str:
    """The last fenced block in one of `languages`; without any block, the whole text."""
    blocks = [(kind.lower(), body) for kind, body in _BLOCK.findall(text)]
    fitting = [body for kind, body in blocks if kind in languages]
    if fitting:
        return fitting[-1]
    return text if not blocks else ""


def sql_rows(
    completions: Sequence[Any], schema: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float | None]:
    """Whether the last SQL block of the reply returns the rows that the query `answer` returns over a fresh
    SQLite database made by the script `schema`. Order counts when `answer` orders its rows; column names
    never do.

    Raises ValueError for a schema or an answer that fails by itself.
    """
    rewards: list[float | None] = []
    with Sandbox.create(policy=_POLICY) as box:
        for completion, script, gold in zip(completions, schema, answer, strict=True):
            query = code_of(words_of(completion), ("sql", "sqlite", "")).strip()
            rewards.append(_same_rows(box, script, gold, query))
    return rewards


def _same_rows(box: Sandbox, script: str, gold: str, query: str) -> float:
    wanted, found = (_rows(box, script, text) for text in (gold, query))
    if wanted is None or "error" in wanted:
        raise ValueError(f"the answer {gold!r} fails over its schema: {wanted}")
    if found is None or "error" in found:
        return 0.0
    if re.search(r"\border\s+by\b", gold, re.IGNORECASE):
        return float(wanted["rows"] == found["rows"])
    return float(Counter(map(tuple, wanted["rows"])) == Counter(map(tuple, found["rows"])))


def _rows(box: Sandbox, script: str, query: str) -> Mapping[str, Any] | None:
    """What one query returned; None when it ran into a limit."""
    request = json.dumps([script, [query], 10_000])
    done = box.exec(["/usr/bin/python3", "-I", "-c", _QUERIES], stdin=request, timeout=10)
    if done.exit in (126, 127):
        raise SandboxInfraError(f"Queries cannot be run: {done.stderr}")
    if done.exit == 1 and "executescript" in done.stderr:
        raise ValueError(f"the schema fails: {done.stderr.strip().splitlines()[-1]}")
    return None if not done.ok else json.loads(done.stdout)[0]
