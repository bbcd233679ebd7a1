"""Runs test functions in a box of their own; the solution is in another box and is reached by messages only.

What tests get from it are plain values, or handles whose comparison the solution has no say in.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from typing import Any

from hetero.sandbox.inside.values import decode, encode, line


class SolutionError(Exception):
    """The solution raised something that is not a built-in exception, or is gone."""


class Wire:
    """Questions to the solution's box, answers from it."""

    def __init__(self) -> None:
        self.inn = os.fdopen(os.dup(0), "rb")
        self.out = os.fdopen(os.dup(1), "wb")
        self.report = os.fdopen(os.dup(2), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)

    def ask(self, *request: Any) -> Any:
        """The answer: a plain value or a Remote; an error of the solution is raised."""
        self.out.write(line(request))
        self.out.flush()
        answered = self.inn.readline()
        if not answered.endswith(b"\n"):
            raise SolutionError("the solution's process has ended")
        try:
            kind, *rest = json.loads(answered)
            if kind == "value":
                return decode(rest[0])
            if kind == "object":
                return Remote(self, int(rest[0]), str(rest[1]))
            name, text = str(rest[0]), str(rest[1])
        except Exception as error:
            raise SolutionError(f"no answer but {answered[:100]!r}") from error
        known = getattr(builtins, name, None)
        plain = isinstance(known, type) and issubclass(known, Exception)
        raise known(text) if plain else SolutionError(f"{name}: {text}")  # type: ignore[misc]


class Remote:
    """An object of the solution's. It equals only itself."""

    def __init__(self, wire: Wire, handle: int, kind: str) -> None:
        self._wire, self._handle, self._kind = wire, handle, kind

    def __getattr__(self, name: str) -> Any:
        return self._wire.ask("get", self._handle, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        packed = {name: _pack(item) for name, item in named.items()}
        return self._wire.ask("call", self._handle, [_pack(item) for item in arguments], packed)

    def __len__(self) -> int:
        return int(self._wire.ask("len", self._handle))

    def __iter__(self) -> Any:
        return iter(self._wire.ask("list", self._handle))

    def __bool__(self) -> bool:
        return self._wire.ask("truth", self._handle) is True

    def __str__(self) -> str:
        return str(self._wire.ask("str", self._handle))


def _pack(item: Any) -> Any:
    return {"object": item._handle} if isinstance(item, Remote) else encode(item)


class Solution(types.ModuleType):
    """Stands for the solution's module."""

    def __init__(self, wire: Wire) -> None:
        super().__init__("solution")
        self.__dict__["_remote"] = Remote(wire, 0, "module")

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._remote._wire.ask("names", 0)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._remote, name)


def main() -> None:
    """The first line on stdin is the work: tests by file name, expected ids. The report leaves on stderr."""
    wire = Wire()
    tests, expected = json.loads(wire.inn.readline())
    sys.modules["solution"] = Solution(wire)
    sys.setrecursionlimit(10_000)
    spaces: dict[str, Any] = {}
    for test in expected:
        name, _, function = test.partition("::")
        try:
            if name not in spaces:
                spaces[name] = {"__name__": name.removesuffix(".py")}
                exec(compile(tests[name], name, "exec"), spaces[name])
            spaces[name][function]()
            outcome = "passed"
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}: {str(error)[:200]}"
        wire.report.write(line([test, outcome]))
        wire.report.flush()


if __name__ == "__main__":
    main()
