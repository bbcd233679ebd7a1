"""What a caller may ask of the sampler, checked before anything runs."""

from __future__ import annotations

import math
import numbers
import operator
import re
from dataclasses import dataclass
from typing import Any

from hetero.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled and when it ends.

    To sample a prompt n times pass it n times: identical prompts of one call are computed once.

    Attributes:
        temperature: divides the logits; 0 is greedy (the lowest id among equal maxima).
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most probable tokens; 0 keeps all.
        min_p: keep tokens at least this share as probable as the most probable one; 0 keeps all.
        max_tokens: sample at most this many tokens (fewer where the model's context ends first).
        stop: strings that end the sequence when they appear in the completion's text, wherever the token
            borders lie.
        stop_ids: token ids that end the sequence, besides the model's own end-of-sequence ids.
        seed: of the random streams; None takes the engine's.
        ignore_eos: go on after the model's own end-of-sequence ids (`stop_ids` still end the sequence).

    Raises:
        ArgumentError: a value is out of its range, or of another kind.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("top_k", "max_tokens", "seed"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, value))
        object.__setattr__(self, "stop_ids", tuple(_whole("stop_ids", i) for i in self.stop_ids))
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _check(isinstance(value, numbers.Real), name, value, "a number")
        _check(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, ">= 0"
        )
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps every token)")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1")
        _check(all(self.stop), "stop", self.stop, "strings of at least one character")
        _check(all(i >= 0 for i in self.stop_ids), "stop_ids", self.stop_ids, "token ids >= 0")


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"SamplingParams.{name} is {value!r}; expected a whole number.") from None


def _check(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ArgumentError(f"SamplingParams.{name} is {got!r}; expected {expected}.")


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as "1GiB", "512 MiB", "2GB" or a plain number; ArgumentError when it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2] not in _UNITS:
        raise ArgumentError(
            f"{size!r} is not a size; expected a number of bytes or such as '1GiB', '512MiB', '2GB'."
        )
    return int(float(match[1]) * _UNITS[match[2]])
