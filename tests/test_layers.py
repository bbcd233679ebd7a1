"""The house: arrows point up, no cycles, no catch-all modules, small files and functions."""

from __future__ import annotations

import ast
import itertools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hetero"
CSRC = ROOT / "csrc"

LAYERS: list[set[str]] = [
    {"errors"},
    {"formats"},
    {"kernels"},
    {"experts"},
    {"models"},
    {"engine", "train", "data", "sandbox"},
    {"rl"},
    {"recipe"},
    {"run"},
    {"loop"},
    {"report", "bench", "doctor"},
    {"cli"},
]
"""Top to bottom. A module imports its own package and layers above; packages in one row do not import each
other."""
CSRC_LAYERS = ["base", "cpu", "formats", "kernels", "ops", "moe", "bindings"]
FORBIDDEN = {"utils", "util", "helpers", "helper", "common", "misc"}
FACADE = "hetero/__init__.py"
"""Names the public objects and loads them on demand; nobody inside imports from it, except `__version__`."""

MEDIAN_FILE, CEILING_FILE, P95_FUNCTION = 120, 260, 65


def _modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _layer(module: str) -> int | None:
    """Row of a module such as `hetero.rl.groups`; None for the facade."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    for row, names in enumerate(LAYERS):
        if parts[1] in names:
            return row
    raise AssertionError(
        f"{module}: {parts[1]} is not in the house; add it to LAYERS and to CONTRIBUTING.md on purpose"
    )


def _imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a hetero module, wherever in the file: TYPE_CHECKING blocks and
    functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "hetero"
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module and node.module.split(".")[0] == "hetero":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner != "hetero._C":  # has a test of its own
                        yield node.lineno, inner if inner in MODULES else node.module


EDGES = [
    (name, line, target)
    for name, path in MODULES.items()
    for line, target in _imports(name, path)
    if path.relative_to(ROOT).as_posix() != FACADE
]


def test_every_module_has_a_layer() -> None:
    assert len(MODULES) > 3
    for name in MODULES:
        _layer(name)


def test_imports_point_up() -> None:
    wrong = []
    for name, line, target in EDGES:
        mine, theirs = _layer(name), _layer(target)
        if theirs is None:
            if name.split(".")[1] != "cli":
                wrong.append(f"{MODULES[name]}:{line}: imports the facade {target}; import the module itself")
            continue
        assert mine is not None
        same_package = name.split(".")[1] == target.split(".")[1]
        if not same_package and theirs >= mine:
            wrong.append(f"{MODULES[name]}:{line}: {name} must not import {target}")
    assert not wrong, "\n".join(wrong)


def test_only_kernels_import_the_extension() -> None:
    wrong = [
        f"{MODULES[n]}:{line}"
        for n, line, target in _extension_imports()
        if not n.startswith("hetero.kernels")
    ]
    assert not wrong, wrong


def _extension_imports() -> Iterator[tuple[str, int, str]]:
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "hetero":
                yield from ((name, node.lineno, a.name) for a in node.names if a.name == "_C")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hetero._C"):
                yield name, node.lineno, "_C"
            elif isinstance(node, ast.Import):
                yield from ((name, node.lineno, "_C") for a in node.names if a.name.startswith("hetero._C"))


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, _, target in EDGES:
        while target not in graph:
            target = target.rpartition(".")[0]
        if target != name and not name.startswith(target + "."):
            graph[name].add(target)
        elif target != name and MODULES[target].name == "__init__.py":
            # A module that imports from its own package's __init__ waits for what waits for it.
            graph[name].add(target)
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        if module in path:
            raise AssertionError("import cycle: " + " -> ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for target in sorted(graph[module]):
            visit(target)
        path.pop()
        done.add(module)

    for module in graph:
        visit(module)


def test_no_catch_all_names() -> None:
    for path in (*MODULES.values(), *CSRC.rglob("*")):
        words = {path.stem, *path.relative_to(ROOT).parts[:-1]}
        assert not words & FORBIDDEN, f"{path}: say what is in it instead of {words & FORBIDDEN}"


def test_files_are_small() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES.values()}
    real = {path: n for path, n in lines.items() if path.name != "__init__.py"}
    assert statistics.median(real.values()) <= MEDIAN_FILE
    large = {str(path): n for path, n in real.items() if n > CEILING_FILE}
    assert not large, f"over {CEILING_FILE} lines, split by subject: {large}"


def test_functions_are_small() -> None:
    lengths = {}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lengths[f"{path}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    ordered = sorted(lengths.values())
    assert ordered[int(0.95 * (len(ordered) - 1))] < P95_FUNCTION
    huge = {name: n for name, n in lengths.items() if n > 2 * P95_FUNCTION}
    assert not huge, huge


def test_no_imports_inside_functions() -> None:
    """Late imports hide arrows. Commands and public names are loaded late in two places only, through
    importlib."""
    wrong = []
    for path in MODULES.values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                    if isinstance(node, ast.ImportFrom):
                        names = [node.module or ""]
                    wrong += [f"{path}:{node.lineno} {n}" for n in names if n.split(".")[0] == "hetero"]
    assert not wrong, wrong
    dynamic = [
        path.relative_to(ROOT).as_posix()
        for path in MODULES.values()
        if re.search(r"import_module\(f?\"hetero|import_module\(_?[A-Z]", path.read_text(encoding="utf-8"))
    ]
    assert set(dynamic) <= {FACADE, "hetero/cli/commands.py"}, dynamic


def test_no_string_stands_alone() -> None:
    """A text that nothing takes is the lost half of a message, unless it documents what is above it."""
    lost = []
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                statements = block if isinstance(block, list) else []
                for before, statement in itertools.pairwise(statements):
                    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.JoinedStr):
                        lost.append(f"{path}:{statement.lineno}")
                    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                        value, named = statement.value.value, isinstance(before, (ast.Assign, ast.AnnAssign))
                        lost += [f"{path}:{statement.lineno}"] if isinstance(value, str) and not named else []
    assert not lost, lost


@pytest.mark.skipif(not CSRC.is_dir(), reason="an installed package has no csrc/")
def test_csrc_includes_point_up() -> None:
    wrong = []
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in {".h", ".cc", ".inc"}:
            continue
        parts = path.relative_to(CSRC).parts
        assert parts[0] in CSRC_LAYERS, f"{path}: {parts[0]} is not a folder of csrc/"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if match is None:
                continue
            target = match[1]
            assert not target.startswith("."), (
                f"{path}:{number}: include from the root of csrc/, not {target}"
            )
            folder = target.split("/")[0]
            assert (CSRC / target).exists(), f"{path}:{number}: no file csrc/{target}"
            if CSRC_LAYERS.index(folder) > CSRC_LAYERS.index(parts[0]):
                wrong.append(f"{path}:{number}: {parts[0]} must not include {target}")
    assert not wrong, "\n".join(wrong)
