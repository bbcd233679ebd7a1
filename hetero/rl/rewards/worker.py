"""A reward worker: loads the reward functions, calls them, sends back numbers. Runs in a process of its own.

Nothing here may import torch or the rest of hetero: a worker must start in milliseconds and stay small.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import inspect
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hetero.rl.rewards import answers, forms
from hetero.rl.rewards.wire import Inbox, frame

_LONGEST_TEXT = 8000


def serve(fd: int, config: dict[str, Any]) -> None:
    """Answer jobs that arrive at the socket `fd` until it closes."""
    sys.path[:] = config["sys_path"]
    functions = [_Function(target, config["timeout"]) for target in config["targets"]]
    inbox = Inbox(fd)
    _send(fd, {"kind": "ready", "functions": [function.describe() for function in functions]})
    worker = os.getpid()

    def answer(result: dict[str, Any]) -> None:
        if os.getpid() != worker:  # a child that the function forked: the answer is its parent's to give
            os._exit(1 if "failure" in result else 0)
        _send(fd, result)

    while inbox.open:
        for header, body in inbox.receive():
            function = functions[header["function"]]
            jobs, start = [], 0
            for number, size in zip(header["ids"], header["sizes"], strict=True):
                jobs.append((number, body[start : start + size]))
                start += size
            function.run(jobs, answer)


def _send(fd: int, header: dict[str, Any]) -> None:
    message = memoryview(frame(header))
    while message:
        message = message[os.write(fd, message) :]


class _Function:
    """One reward function as the worker knows it: loaded, or with the reason why it could not be."""

    def __init__(self, target: dict[str, Any], timeout: float) -> None:
        self.error: str | None = None
        self.timeout = timeout
        self.options: dict[str, Any] = pickle.loads(base64.b64decode(target["options"]))
        self.parameters: dict[str, inspect.Parameter] = {}
        self.is_async = False
        try:
            self.call: Callable[..., Any] = _load(target)
            self.parameters = dict(inspect.signature(self.call).parameters)
            self.is_async = inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
                getattr(self.call, "__call__", None)  # noqa: B004 (an instance whose __call__ is async)
            )
        except BaseException as error:
            self.error = _trace(error)

    @property
    def takes_all(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def describe(self) -> dict[str, Any]:
        plain = [p for p in self.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return {
            "error": self.error,
            "is_async": self.is_async,
            "takes_all": self.takes_all,
            "parameters": [p.name for p in plain],
            "required": [p.name for p in plain if p.default is p.empty and p.name not in self.options],
        }

    def run(self, jobs: list[tuple[int, bytes]], answer: Callable[[dict[str, Any]], None]) -> None:
        """Call the function for every job and `answer` each as soon as it is done."""
        if self.is_async:
            asyncio.run(self._run_together(jobs, answer))
            return
        for number, data in jobs:
            try:
                call = _Call(self, data)
                result = call.finish(self.call(**call.arguments))
            except BaseException as error:  # a reward that calls sys.exit() must not end the worker
                result = _failure("exception", _trace(error))
            answer({"kind": "result", "id": number, **result})

    async def _run_together(
        self, jobs: list[tuple[int, bytes]], answer: Callable[[dict[str, Any]], None]
    ) -> None:
        async def one(number: int, data: bytes) -> None:
            try:
                call = _Call(self, data)
                result = call.finish(await asyncio.wait_for(self.call(**call.arguments), self.timeout))
            except asyncio.TimeoutError:
                result = _failure("timeout", f"no answer within {self.timeout:g} s")
            except BaseException as error:
                result = _failure("exception", _trace(error))
            answer({"kind": "result", "id": number, **result})

        await asyncio.gather(*(one(number, data) for number, data in jobs))


class _Call:
    """The arguments of one call in TRL's form, and what comes of it."""

    def __init__(self, function: _Function, data: bytes) -> None:
        sent: dict[str, Any] = pickle.loads(data)
        self.count = len(sent["completions"])
        self.metrics: dict[str, list[float]] = {}
        offered = {
            **sent["columns"],
            "prompts": sent["prompts"],
            "completions": sent["completions"],
            "completion_ids": sent["completion_ids"],
            "trainer_state": SimpleNamespace(global_step=sent["step"]),
            "log_metric": lambda name, value: self.metrics.setdefault(str(name), []).append(float(value)),
            "log_extra": lambda name, values: None,
            **function.options,
        }
        if function.takes_all:
            self.arguments = offered
        else:
            self.arguments = {name: value for name, value in offered.items() if name in function.parameters}

    def finish(self, result: Any) -> dict[str, Any]:
        """The answer to a call that returned `result`."""
        if hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            return _failure(
                "bad_result", f"returned {_short(result)} where a list with one reward per completion is due"
            )
        if len(result) != self.count:
            return _failure("bad_result", f"returned {len(result)} rewards for {self.count} completions")
        values, parts = [], []
        for item in result:
            value, part, problem = _number(item)
            if problem is not None:
                return problem
            values.append(value)
            parts.append(part)
        return {"values": values, "parts": parts, "metrics": self.metrics}


def _number(item: Any) -> tuple[float | None, dict[str, float], dict[str, Any] | None]:
    """(reward, further numbers to log, or else what is wrong) of one entry of a reward function's result."""
    parts: dict[str, float] = {}
    if isinstance(item, dict):
        key = next((name for name in ("reward", "score") if name in item), None)
        if key is None:
            return (
                None,
                {},
                _failure("bad_result", f"returned a dict without `reward` or `score`: {_short(item)}"),
            )
        for name, value in item.items():
            if name != key and isinstance(value, (int, float)) and math.isfinite(value):
                parts[str(name)] = float(value)
        item = item[key]
    if item is None:
        return None, parts, None
    try:
        value = float(item)
    except (TypeError, ValueError, OverflowError):
        return None, {}, _failure("bad_result", f"returned {_short(item)} where a number or None is due")
    if not math.isfinite(value):
        return (
            None,
            {},
            _failure("nonfinite", f"returned {value}; return None for a sample that cannot be scored"),
        )
    return value, parts, None


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"failure": kind, "message": message[-_LONGEST_TEXT:]}


def _trace(error: BaseException) -> str:
    """The traceback from the user's code on."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner))[-_LONGEST_TEXT:].strip()


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else text[:117] + "..."


def _load(target: dict[str, Any]) -> Callable[..., Any]:
    if target["kind"] == "pickle":
        function: Any = pickle.loads(base64.b64decode(target["data"]))
    else:
        place = target["place"]
        holder: Any = _LOADERS[target["kind"]](place)
        for part in target["name"].split("."):
            if not hasattr(holder, part):
                raise AttributeError(f"{place} has no function {target['name']!r}")
            holder = getattr(holder, part)
        function = holder() if inspect.isclass(holder) else holder
    if not callable(function):
        raise TypeError(f"{target['name']} is not a function but {_short(function)}")
    return function


def _load_file(place: str) -> Any:
    name = f"hetero_reward_{Path(place).stem}"
    folder = str(Path(place).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it can import its neighbours, as if it were run
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_LIGHT = {module.__name__: module for module in (answers, forms)}


def _load_builtin(place: str) -> Any:
    """A module of ours: there already, or (rewards that run code in sandboxes) imported by the workers that
    use it, and made ready: that happens before the trainer loads its model."""
    module = _LIGHT.get(place) or importlib.import_module(place)
    getattr(module, "prepare", lambda: None)()
    return module


_LOADERS: dict[str, Callable[[str], Any]] = {
    "builtin": _load_builtin,
    "file": _load_file,
    "module": importlib.import_module,
}
