"""Tools for models that act: each is a function of plain arguments that returns text, and never raises for
what the model did wrong, only for what failed on our side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero.errors import ArgumentError
from hetero.sandbox.errors import DiskLimit, PolicyDenied
from hetero.sandbox.patch import PatchError, apply_hunks, parse
from hetero.sandbox.result import Result
from hetero.sandbox.sandbox import Sandbox

_LONGEST = 20_000
_SQL = """
import json, sqlite3, sys
database, statement, limit = json.load(sys.stdin)
connection = sqlite3.connect(database)
try:
    cursor = connection.execute(statement)
    rows = cursor.fetchmany(limit + 1)
    connection.commit()
    names = [column[0] for column in cursor.description or ()]
    print(json.dumps({"columns": names, "rows": rows[:limit], "more": len(rows) > limit}, default=repr))
except (sqlite3.Error, sqlite3.Warning) as error:
    print(json.dumps({"error": str(error)}))
"""


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name, description: for the model.
        parameters: JSON schema of its arguments.
        call: the function: (box, **arguments) -> text.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., str]

    def schema(self) -> dict[str, Any]:
        """What chat templates take as a tool."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def call_tool(box: Sandbox, name: str, arguments: Mapping[str, Any] | str) -> str:
    """Run a call as a model wrote it. Mistakes of the model come back as text that starts with "error:".

    Raises SandboxDead and SandboxInfraError when the box failed.
    """
    tool = TOOLS.get(name)
    if tool is None:
        return f"error: there is no tool {name!r}; the tools are {', '.join(TOOLS)}"
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    wrong = _wrong_arguments(tool, given)
    if wrong:
        return f"error: {wrong}"
    try:
        return _bounded(tool.call(box, **given))
    except (PolicyDenied, DiskLimit, ArgumentError, OSError, PatchError) as error:
        return f"error: {error}"


def _wrong_arguments(tool: Tool, given: Any) -> str:
    if not isinstance(given, dict):
        return "the arguments must be an object"
    properties = tool.parameters["properties"]
    missing = [name for name in tool.parameters["required"] if name not in given]
    unknown = [name for name in given if name not in properties]
    if missing or unknown:
        return f"{tool.name} takes {', '.join(properties)}; missing {missing}, unknown {unknown}"
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float)}
    for name, value in given.items():
        if not isinstance(value, kinds[properties[name]["type"]]) or isinstance(value, bool):
            return f"{name} must be a {properties[name]['type']}"
    return ""


def _bounded(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _told(result: Result) -> str:
    parts = [result.stdout, result.stderr]
    if result.reason:
        parts.append(f"[stopped by its limit: {result.reason}]")
    elif result.status != 0:
        parts.append(f"[exit status {result.status}]")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"


def _python(box: Sandbox, code: str, timeout: float = 30) -> str:
    done = box.python(code, timeout=timeout)
    parts = [done.stdout, done.stderr]
    if done.reason:
        parts.append(f"[the interpreter has ended, its variables are gone: {done.reason}]")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"


def _bash(box: Sandbox, command: str, timeout: float = 60) -> str:
    return _told(box.exec(command, timeout=timeout))


def _read_file(box: Sandbox, path: str, first_line: int = 1, num_lines: int = 400) -> str:
    lines = box.read_file(path).decode("utf-8", "replace").splitlines()
    shown = lines[max(first_line, 1) - 1 :][:num_lines]
    return "\n".join(f"{number:6} {line}" for number, line in enumerate(shown, max(first_line, 1)))


def _write_file(box: Sandbox, path: str, content: str) -> str:
    box.write_file(path, content)
    return f"wrote {len(content.encode())} bytes to {path}"


def _apply_patch(box: Sandbox, patch: str) -> str:
    """All files of the patch, or none: what would fail is found before anything is written."""
    written: dict[str, str] = {}
    for path, hunks in parse(patch):
        known = written.get(path)
        if known is None:
            fresh = all(not any(line[0] != "+" for line in hunk.lines) for hunk in hunks)
            try:
                known = box.read_file(path).decode()
            except FileNotFoundError:
                if not fresh:
                    raise
                known = ""
        written[path] = apply_hunks(known, hunks, path)
    for path, text in written.items():
        box.write_file(path, text)
    return f"patched {', '.join(written)}"


def _sql(box: Sandbox, statement: str, database: str = "/workspace/data.db", limit: int = 100) -> str:
    done = box.exec(["python3", "-I", "-c", _SQL], stdin=json.dumps([database, statement, limit]), timeout=30)
    return done.stdout.strip() if done.ok else _told(done)


def _tool(name: str, call: Callable[..., str], description: str, **parameters: str) -> Tool:
    optional = {"timeout", "first_line", "num_lines", "database", "limit"}
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    required = [key for key in parameters if key not in optional]
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(name, description, schema, call)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        _tool(
            "python",
            _python,
            "Run Python code and see what it prints; variables stay between calls.",
            code="string",
            timeout="number",
        ),
        _tool("bash", _bash, "Run a shell command in /workspace.", command="string", timeout="number"),
        _tool(
            "read_file",
            _read_file,
            "Read a text file with line numbers.",
            path="string",
            first_line="integer",
            num_lines="integer",
        ),
        _tool("write_file", _write_file, "Write a whole text file.", path="string", content="string"),
        _tool("apply_patch", _apply_patch, "Apply a unified diff, all of it or nothing.", patch="string"),
        _tool(
            "sql",
            _sql,
            "Run one SQLite statement; rows come back as JSON.",
            statement="string",
            database="string",
            limit="integer",
        ),
    )
}
"""The tools by name."""


def run_script(box: Sandbox, script: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A scripted agent: calls tools one after the other; what each returned."""
    return [call_tool(box, name, arguments) for name, arguments in script]
