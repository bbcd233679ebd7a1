"""Which reward functions there are, how a user names one, and how a worker finds it."""

from __future__ import annotations

import base64
import difflib
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hetero.errors import RewardError
from hetero.rl.rewards import answers, forms, programs, shell

REWARDS: dict[str, Callable[..., list[float | None]]] = {
    function.__name__: function
    for function in (
        answers.last_number,
        answers.exact,
        answers.contains,
        answers.choice,
        answers.regex,
        forms.number_only,
        forms.json_keys,
        forms.max_words,
        forms.bullets,
        forms.no_commas,
        forms.title,
        forms.tags,
        forms.soft_overlong,
        forms.instruction,
        programs.python_tests,
        programs.sql_rows,
        shell.shell_task,
    )
}
"""The built-in reward functions by name. Their docstrings say what each really checks."""


@dataclass(frozen=True)
class RewardSpec:
    """One reward function and its part in the sum.

    Attributes:
        function: a built-in name; "package.module:function"; "path/to/file.py:function"; or a function at
            the top level of a module.
        weight: factor in the weighted sum.
        options: keyword arguments given at every call.
        per: what one call scores. "sample": each completion on its own, as soon as it is there, so that one
            that hangs or raises costs itself only. "group": all completions of a prompt together, for
            rewards that compare them.
        name: in metrics; by default the function's.
    """

    function: str | Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    per: Literal["sample", "group"] = "sample"
    name: str = ""

    @property
    def label(self) -> str:
        """The name in metrics."""
        if self.name:
            return self.name
        if isinstance(self.function, str):
            return self.function.rpartition(":")[2]
        inner = getattr(self.function, "func", self.function)
        return str(getattr(inner, "__name__", type(inner).__name__))


def as_spec(reward: RewardSpec | str | Callable[..., Any]) -> RewardSpec:
    """A spec of a name or a function."""
    return reward if isinstance(reward, RewardSpec) else RewardSpec(reward)


def labels(specs: list[RewardSpec]) -> list[str]:
    """A different name for each spec: `regex`, `regex_2`."""
    found: list[str] = []
    for spec in specs:
        number = 1
        while (label := spec.label if number == 1 else f"{spec.label}_{number}") in found:
            number += 1
        found.append(label)
    return found


def target(spec: RewardSpec) -> dict[str, Any]:
    """Where a worker finds the function: plain JSON. Raises RewardError for a name that cannot be one."""
    options = base64.b64encode(_pickled(dict(spec.options), f"the options of {spec.label}")).decode()
    return {**_place(spec.function, spec.label), "options": options}


def _place(function: str | Callable[..., Any], label: str) -> dict[str, Any]:
    if not isinstance(function, str):
        return _place_of_callable(function, label)
    if function in REWARDS:
        return {"kind": "builtin", "place": REWARDS[function].__module__, "name": function}
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name:
        near = difflib.get_close_matches(function, REWARDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RewardError(
            f"There is no built-in reward {function!r}.{hint} Built in are {', '.join(REWARDS)}. Name one "
            "of your own as "
            "package.module:function or path/to/file.py:function."
        )
    if place.endswith(".py") or "/" in place:
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise RewardError(
                f"There is no file {place} for the reward {function!r} (looked in {Path.cwd()})."
            )
        return {"kind": "file", "place": str(path), "name": name}
    return {"kind": "module", "place": place, "name": name}


def _place_of_callable(function: Callable[..., Any], label: str) -> dict[str, Any]:
    main = sys.modules["__main__"]
    if getattr(function, "__module__", "") == "__main__" and hasattr(main, "__file__"):
        return {
            "kind": "file",
            "place": str(Path(str(main.__file__)).resolve()),
            "name": function.__qualname__,
        }
    data = _pickled(function, f"the reward {label}")
    return {"kind": "pickle", "data": base64.b64encode(data).decode(), "name": label}


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise RewardError(
            f"Reward functions run in processes of their own, but {what} cannot be sent there ({error}). "
            "Define the function at "
            "the top level of a module (no lambda, no function in a function), or name it as "
            "path/to/file.py:function."
        ) from None
