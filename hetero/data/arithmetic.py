"""Short arithmetic, generated: every question about a pair of operands is either in training or held out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement
from typing import Any

from hetero.errors import DataError

_WORDS = {"add": "plus", "sub": "minus", "mul": "times"}
_ALIASES = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "addition": "add",
    "subtraction": "sub",
    "multiplication": "mul",
}
_ENUMERATED = 2**19
"""Up to so many pairs all of them are listed; above, pairs are drawn at random."""

Pair = tuple[int, int]


def arithmetic(
    split: str,
    *,
    operations: str | Iterable[str] = "mul",
    digits: int = 1,
    held_out: float = 0.2,
    size: int | None = None,
    seed: int = 0,
    prompt: str = "What is {a} {operation} {b}? Reply with only the number.",
) -> list[dict[str, Any]]:
    """Questions such as "What is 7 times 8? Reply with only the number."

    Which pairs are held out depends on `seed` and the pair {a, b} alone: not on its order, the operation or
    the size. So a held-out question never appears in training in any guise.

    Args:
        split: "train" or "held_out".
        operations: one or several of add, sub, mul. A difference is never negative: the larger operand comes
            first.
        digits: digits of both operands (1 means 1 to 9, 2 means 10 to 99).
        held_out: share of the pairs that is held out.
        size: how many questions; by default all there are, or 4096 if there are more.
        seed: seed of the choice of pairs and of their order.
        prompt: template over a, b and operation (plus, minus, times).

    Returns:
        Rows with the columns prompt, answer (text), operation, a and b. Raises DataError for a bad option.
    """
    names = _operations(operations)
    if not 1 <= digits <= 9:
        raise DataError(f"arithmetic: digits is {digits}, but must be 1 to 9.")
    if not 0 < held_out < 1:
        raise DataError(f"arithmetic: held_out is {held_out}, but must be between 0 and 1.")
    if size is not None and size < 1:
        raise DataError(f"arithmetic: size is {size}, but must be at least 1.")
    wanted = 4096 if size is None else size
    rows: list[dict[str, Any]] = []
    for a, b in _pairs(split, digits, held_out, seed, wanted):
        rows.extend(_row(name, x, y, prompt) for name in names for x, y in _orders(name, a, b))
        if len(rows) >= wanted:
            break
    if size is not None and len(rows) < size:
        raise DataError(
            f"arithmetic: there are only {len(rows)} questions of {digits} digit(s) in {split}, not {size}."
        )
    rows.sort(key=lambda row: _draw(f"{seed}:{row['operation']}:{row['a']}:{row['b']}"))
    return rows[:wanted]


def _operations(operations: str | Iterable[str]) -> list[str]:
    listed = [operations] if isinstance(operations, str) else list(operations)
    names = [_ALIASES.get(name, name) for name in listed]
    unknown = [name for name in names if name not in _WORDS]
    if unknown or not names:
        raise DataError(
            f"arithmetic: operations must be one or several of {', '.join(_WORDS)}, got {listed}."
        )
    return list(dict.fromkeys(names))


def _pairs(split: str, digits: int, held_out: float, seed: int, wanted: int) -> Iterator[Pair]:
    """Different unordered pairs of `split`, in a random order; at least `wanted` of them if there are so
    many."""
    low, high = 10 ** (digits - 1), 10**digits - 1
    span = high - low + 1
    total = span * (span + 1) // 2
    share = held_out if split == "held_out" else 1 - held_out
    if total <= _ENUMERATED:
        ranked = sorted(
            combinations_with_replacement(range(low, high + 1), 2), key=lambda pair: _rank(pair, seed)
        )
        num_apart = min(max(round(held_out * total), 1), total - 1)
        yield from ranked[:num_apart] if split == "held_out" else ranked[num_apart:]
        return
    if wanted > share * total / 2:
        raise DataError(
            f"arithmetic: {wanted} questions are too many to draw from a share of {share} of {total} pairs."
        )
    stream = random.Random(f"arithmetic:{seed}:{digits}:{split}")
    seen: set[Pair] = set()
    while True:
        x, y = (low + int(stream.random() * span) for _ in range(2))
        pair = (min(x, y), max(x, y))
        if pair not in seen and (_rank(pair, seed) < held_out) == (split == "held_out"):
            seen.add(pair)
            yield pair


def _rank(pair: Pair, seed: int) -> float:
    return _draw(f"{seed}:{pair[0]}:{pair[1]}")


def _draw(text: str) -> float:
    """A number in [0, 1) that belongs to this text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64


def _orders(name: str, a: int, b: int) -> list[Pair]:
    """The questions about the pair a <= b: both orders, except for a difference."""
    if name == "sub":
        return [(b, a)]
    return [(a, b)] if a == b else [(a, b), (b, a)]


def _row(name: str, a: int, b: int, prompt: str) -> dict[str, Any]:
    result = {"add": a + b, "sub": a - b, "mul": a * b}[name]
    try:
        text = prompt.format(a=a, b=b, operation=_WORDS[name])
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"arithmetic: the prompt {prompt!r} is not a template over {{a}}, {{b}}, {{operation}} ({error})."
        ) from None
    return {"prompt": text, "answer": str(result), "operation": name, "a": a, "b": b}
