"""Built-in rewards that compare a reply with the column `answer`. 1.0 for right, 0.0 for wrong, None without
an answer.

They run in reward workers: only the standard library may be imported here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
_LONGEST_NUMBER = 400
_LETTER = re.compile(r"(?<![A-Za-z0-9_'’])([A-Z])(?![A-Za-z0-9_'’])")


def last_number(
    completions: Sequence[Any], answer: Sequence[Any], tolerance: float = 0.0, **columns: Any
) -> list[float | None]:
    """Whether the last number in the reply is the answer: "7 + 7 = 14." answers 14, and so does "14.0".

    The answer is a number, or a text whose last number counts (as in "... #### 72"). Thousands may be set
    apart by commas. Units, currency and per cent signs are ignored; of a fraction such as 1/2 only the 2 is
    seen. `tolerance` is relative to the answer. Says nothing about the rest of the reply: add `number_only`
    for replies of nothing but the number.
    """

    def same(text: str, gold: Any) -> bool:
        wanted = numbers(str(gold))
        if not wanted or wanted[-1] is None:
            raise ValueError(f"the answer {gold!r} holds no number; use the reward `exact` or `contains`")
        said = (numbers(text) or [None])[-1]
        return said is not None and abs(said - wanted[-1]) <= Fraction(tolerance) * abs(wanted[-1])

    return _judge(completions, answer, same)


def exact(
    completions: Sequence[Any], answer: Sequence[Any], ignore_case: bool = False, **columns: Any
) -> list[float | None]:
    """Whether the reply is the answer, but for white space around it. Nothing may precede or follow it."""

    def same(text: str, gold: Any) -> bool:
        said, wanted = text.strip(), str(gold).strip()
        return said.casefold() == wanted.casefold() if ignore_case else said == wanted

    return _judge(completions, answer, same)


def contains(
    completions: Sequence[Any], answer: Sequence[Any], ignore_case: bool = True, **columns: Any
) -> list[float | None]:
    """Whether the answer stands somewhere in the reply as whole words. Easily gamed: who lists everything is
    right, too."""
    flags = re.IGNORECASE if ignore_case else 0

    def found(text: str, gold: Any) -> bool:
        return re.search(rf"(?<!\w){re.escape(str(gold).strip())}(?!\w)", text, flags) is not None

    return _judge(completions, answer, found)


def choice(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Whether the last capital letter that stands alone in the reply is the answer, as in "The answer is
    (B)." for B.

    The words A and I count as letters when they come last: ask for the letter alone.
    """

    def chosen(text: str, gold: Any) -> bool:
        letters = _LETTER.findall(text)
        return bool(letters) and letters[-1] == str(gold).strip().strip("().").upper()

    return _judge(completions, answer, chosen)


def regex(completions: Sequence[Any], pattern: str | Sequence[str], **columns: Any) -> list[float | None]:
    r"""Whether the regular expression `pattern` (an option or a column) matches in the reply; write \A ...
    \Z for all of it."""
    patterns = [pattern] * len(completions) if isinstance(pattern, str) else pattern
    return _judge(completions, patterns, lambda text, wanted: re.search(wanted, text, re.DOTALL) is not None)


def words_of(completion: Any) -> str:
    """What was said: a text as it is, of messages those of the assistant."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return "\n".join(text for text in said if isinstance(text, str))


def numbers(text: str) -> list[Fraction | None]:
    """All numbers in a text, in order; None for one that is too long to be meant."""
    plain = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    return [_number(match.replace(",", "")) for match in _NUMBER.findall(plain)]


def _number(text: str) -> Fraction | None:
    exponent = text.lower().partition("e")[2].lstrip("+-")
    return Fraction(text) if len(text) <= _LONGEST_NUMBER and len(exponent) <= 3 else None


def _judge(
    completions: Sequence[Any], answers: Sequence[Any], same: Callable[[str, Any], bool]
) -> list[float | None]:
    pairs = zip(completions, answers, strict=True)
    return [None if gold is None else float(same(words_of(completion), gold)) for completion, gold in pairs]
