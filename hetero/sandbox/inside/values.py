"""Plain values as JSON that keeps their types; used on both sides of a box."""

from __future__ import annotations

import json
from typing import Any


class NotPlain(Exception):
    """A value that is not plain: an object that could answer questions about itself as it likes."""


def encode(value: Any) -> Any:
    """Tagged JSON of None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict; exact types
    only."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int or kind is float:
        return {"int" if kind is int else "float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise NotPlain(kind.__name__)


def decode(data: Any) -> Any:
    """The value of `encode`. Raises ValueError, TypeError or KeyError for anything else."""
    if not isinstance(data, dict):
        if data is None or isinstance(data, (bool, str)):
            return data
        raise ValueError(f"not a tagged value: {data!r:.50}")
    ((kind, content),) = data.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in ("int", "float"):
        return int(content) if kind == "int" else float(content)
    makers: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return makers[kind](decode(item) for item in content)


def line(message: Any) -> bytes:
    """One message."""
    return json.dumps(message).encode() + b"\n"
