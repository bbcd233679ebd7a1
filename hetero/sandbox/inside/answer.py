"""Answers calls about the solution: the only program that shares a process with it. Knows no expected
value."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

from hetero.sandbox.inside.values import NotPlain, decode, encode, line


def main() -> None:
    """argv: the solution's file. Requests come as lines on stdin, answers leave on the first stdout."""
    asked = os.fdopen(os.dup(0), "rb")
    said = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    objects: dict[int, Any] = {}
    path = sys.argv[1]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.setrecursionlimit(10_000)
    try:
        spec = importlib.util.spec_from_file_location("solution", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["solution"] = module
        spec.loader.exec_module(module)
        objects[0] = module
    except BaseException as error:
        failure: Any = ["error", type(error).__name__, str(error)[:300]]
    else:
        failure = None
    for request in asked:
        said.write(line(failure or answer(objects, json.loads(request))))
        said.flush()


def answer(objects: dict[int, Any], request: Any) -> Any:
    """["value", plain], ["object", handle, type name] or ["error", type name, text]."""
    operation, handle, *rest = request
    try:
        if operation == "names":
            return ["value", encode([name for name in vars(objects[0]) if not name.startswith("_")])]
        if operation == "get":
            result = getattr(objects[handle], rest[0])
        elif operation == "call":
            arguments = [reference(objects, item) for item in rest[0]]
            named = {name: reference(objects, item) for name, item in rest[1].items()}
            result = objects[handle](*arguments, **named)
        else:
            functions: dict[str, Any] = {"len": len, "str": str, "truth": bool, "list": list}
            result = functions[operation](objects[handle])
        try:
            return ["value", encode(result)]
        except NotPlain:
            number = len(objects)
            objects[number] = result
            return ["object", number, type(result).__name__]
    except BaseException as error:
        return ["error", type(error).__name__, str(error)[:300]]


def reference(objects: dict[int, Any], item: Any) -> Any:
    """An argument: a plain value, or an object that was handed out before."""
    return objects[item["object"]] if isinstance(item, dict) and "object" in item else decode(item)


if __name__ == "__main__":
    main()
