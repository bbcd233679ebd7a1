"""Runs code that comes as lines on stdin, in one namespace that stays; shows the value of a last expression.

After each run a mark goes to both output streams: what came before it belongs to the run.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any


def main() -> None:
    """Serve until stdin ends."""
    asked = os.fdopen(os.dup(0), "rb")
    marked = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if "" not in sys.path:
        sys.path.insert(0, "")
    for number, row in enumerate(asked, 1):
        mark, code = json.loads(row)
        forget_changed()
        error = run(code, f"<python {number}>", module.__dict__)
        forget_changed()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the code has closed it
                stream.flush()
        told = b"\0" + mark.encode() + error.encode("utf-8", "replace")[:200].replace(b"\n", b" ") + b"\n"
        for handle in marked:
            os.write(handle, told)


def run(code: str, name: str, space: dict[str, Any]) -> str:
    """ "" or the name of the exception that ended the code, whose traceback is on stderr."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as left:
        return "" if left.code in (None, 0) else f"SystemExit: {left.code}"
    except BaseException as error:
        skipped = error.__traceback__
        while skipped is not None and skipped.tb_frame.f_code is run.__code__:
            skipped = skipped.tb_next
        traceback.print_exception(type(error), error, skipped)
        return type(error).__name__
    return ""


def forget_changed() -> None:
    """Let modules be imported afresh whose file below the working directory has changed since."""
    here = os.getcwd() + os.sep
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not os.path.abspath(path).startswith(here):
            continue
        try:
            status = os.stat(path)
            stamp = (status.st_mtime_ns, status.st_size)
        except OSError:
            stamp = (0, 0)
        if _seen.setdefault(name, stamp) != stamp:
            del sys.modules[name], _seen[name]


_seen: dict[str, tuple[int, int]] = {}

if __name__ == "__main__":
    main()
