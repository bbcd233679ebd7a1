"""Built-in rewards that look at the form of a reply, not at what it says. 1.0 or 0.0 unless stated otherwise.

Limits are options (one for all) or columns of the data set (one for each row, None where the reward does not
apply). They run in reward workers: only the standard library may be imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hetero.rl.rewards.answers import numbers, words_of


def number_only(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Whether the reply is one number and nothing else, but for white space around it."""

    def alone(text: str, _: None) -> bool:
        digits = text.strip()
        return (
            len(numbers(digits)) == 1
            and re.fullmatch(r"[-+\u2212]?[0-9.,]*[0-9](?:[eE][-+]?[0-9]+)?", digits) is not None
        )

    return _judge(completions, alone)


def json_keys(completions: Sequence[Any], keys: Sequence[Any], **columns: Any) -> list[float | None]:
    """Whether the reply is a JSON object with exactly the given keys, and nothing around it: no prose, no
    code fence."""
    each = [keys] * len(completions) if all(isinstance(key, str) for key in keys) else keys
    return _judge(completions, _has_keys, each)


def _has_keys(text: str, wanted: Sequence[str]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(value) == set(wanted)


def max_words(
    completions: Sequence[Any], max_words: int | Sequence[int | None], **columns: Any
) -> list[float | None]:
    """Whether the reply has at least one and at most `max_words` words, words being what white space
    parts."""
    return _judge(completions, lambda text, limit: 1 <= len(text.split()) <= limit, max_words)


def bullets(
    completions: Sequence[Any], num_bullets: int | Sequence[int | None], marker: str = "* ", **columns: Any
) -> list[float | None]:
    """Whether exactly `num_bullets` lines of the reply begin with `marker` and say something after it; other
    lines may be there."""

    def count(text: str, wanted: int) -> bool:
        lines = (line.strip() for line in text.splitlines())
        return sum(line.startswith(marker) and line != marker.strip() for line in lines) == wanted

    return _judge(completions, count, num_bullets)


def no_commas(
    completions: Sequence[Any], num_sentences: int | None = None, **columns: Any
) -> list[float | None]:
    """Whether the reply says something without a comma; with `num_sentences`, in so many sentences (ends in
    . ! or ?)."""

    def plain(text: str, _: None) -> bool:
        ends = len(re.findall(r"[.!?]+(?=\s|$)", text))
        return bool(text.strip()) and not re.search("[,，、]", text) and num_sentences in (None, ends)

    return _judge(completions, plain)


def title(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Whether the reply holds a title in double angle brackets, such as <<poem of joy>>."""
    return _judge(completions, lambda text, _: re.search(r"<<[^<>\n]*[^<>\s][^<>\n]*>>", text) is not None)


def tags(
    completions: Sequence[Any], tags: Sequence[str] = ("think", "answer"), **columns: Any
) -> list[float | None]:
    """Whether the reply is one element of each of `tags` (an option), in this order, each closed and none
    empty or nested."""
    body = r"\s*".join(
        rf"<{re.escape(tag)}>(?:(?!</?(?:{'|'.join(map(re.escape, tags))})>).)+</{re.escape(tag)}>"
        for tag in tags
    )
    return _judge(completions, lambda text, _: re.fullmatch(rf"\s*{body}\s*", text, re.DOTALL) is not None)


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], max_tokens: int, buffer: int, **columns: Any
) -> list[float | None]:
    """A penalty for length: 0 up to max_tokens - buffer tokens, then falling evenly to -1 at max_tokens and
    beyond.

    DAPO's "soft overlong punishment", arXiv 2503.14476, equation 13. Add it with a weight to the reward of
    the task.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer is {buffer}, but must be more than 0 and at most max_tokens = {max_tokens}")
    return [-min(max(len(ids) - (max_tokens - buffer), 0) / buffer, 1.0) for ids in completion_ids]


def instruction(completions: Sequence[Any], kind: Sequence[str | None], **columns: Any) -> list[float | None]:
    """What the row's `kind` asks for: rows of the generator `instructions` of all kinds may be mixed."""
    judges: dict[str, Callable[..., list[float | None]]] = {
        "json": json_keys,
        "bullets": bullets,
        "words": max_words,
        "no_commas": no_commas,
        "title": title,
    }
    found: list[float | None] = []
    for index, (completion, name) in enumerate(zip(completions, kind, strict=True)):
        row = {
            key: columns[key][index : index + 1]
            for key in ("keys", "num_bullets", "max_words")
            if key in columns
        }
        found += [None] if name is None else judges[name]([completion], **row)
    return found


def _judge(
    completions: Sequence[Any], meets: Callable[[str, Any], bool], limits: Any = ()
) -> list[float | None]:
    """1.0 or 0.0 for each reply; with limits, one for all or one for each, None where the limit is None."""
    if limits == ():
        return [float(meets(words_of(completion), None)) for completion in completions]
    each = limits if isinstance(limits, (list, tuple)) else [limits] * len(completions)
    pairs = zip(completions, each, strict=True)
    return [
        None if limit is None else float(meets(words_of(completion), limit)) for completion, limit in pairs
    ]
