"""Small instructions whose fulfilment a program can check: formats, lengths, forbidden characters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from hetero.errors import DataError

_TOPICS = """
apple ant bicycle bridge bread butterfly camera candle castle cat cheese chess clock cloud coffee
compass computer desert dog dolphin dragon drum eagle elephant engine factory farmer ferry fire fish
flower forest fox garden ghost glacier guitar hammer harbor honey horse house iceberg island jungle
kitchen kite ladder lake lamp lemon library lighthouse lion map market meadow mirror moon mountain
mouse museum music needle nurse ocean olive orchestra owl painter paper parrot penguin piano pilot
pirate planet poem potato pyramid rabbit radio railway rain rainbow river robot rocket rose sailor
salt school shadow shark sheep ship shoe silver snow spider spoon star storm street sugar sun
teacher telescope temple theater tiger tomato tower toy train tree tunnel turtle umbrella valley
village violin volcano watch waterfall whale wheel wind window winter wolf zebra
""".split()  # noqa: SIM905 (a list of so many words is better read as text)

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "json": (
        "Output only a JSON object with the keys name and color that describes a {topic}.",
        {"keys": ["name", "color"]},
    ),
    "bullets": (
        'Name facts about a {topic} as exactly 3 bullet points. Begin each with "* ".',
        {"num_bullets": 3},
    ),
    "words": ("Describe a {topic} in at most 8 words.", {"max_words": 8}),
    "no_commas": ("Write two sentences about a {topic}. Do not use any commas.", {}),
    "title": (
        "Write a poem about a {topic} and give it a title in double angle brackets, such as <<title>>.",
        {},
    ),
}


def instructions(
    split: str, *, kinds: str | Iterable[str] = tuple(_KINDS), held_out: float = 0.25, seed: int = 0
) -> list[dict[str, Any]]:
    """One instruction per kind and topic; a topic is either in training or held out, whatever the kind.

    Args:
        split: "train" or "held_out".
        kinds: some of json, bullets, words, no_commas, title.
        held_out: share of the topics that is held out.
        seed: seed of the choice of topics and of their order.

    Returns:
        Rows with the columns prompt, kind, topic, keys, num_bullets and max_words (None where the kind has
        none), which are the arguments that the built-in rewards of these names read. Raises DataError for a
        bad option.
    """
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    unknown = [name for name in names if name not in _KINDS]
    if unknown or not names:
        raise DataError(f"instructions: kinds must be one or several of {', '.join(_KINDS)}, got {names}.")
    if not 0 < held_out < 1:
        raise DataError(f"instructions: held_out is {held_out}, but must be between 0 and 1.")
    ranked = sorted(_TOPICS, key=lambda topic: hashlib.blake2b(f"{seed}:{topic}".encode()).digest())
    num_apart = min(max(round(held_out * len(ranked)), 1), len(ranked) - 1)
    topics = ranked[:num_apart] if split == "held_out" else ranked[num_apart:]
    return [_row(name, topic) for topic in topics for name in names]


def _row(name: str, topic: str) -> dict[str, Any]:
    template, arguments = _KINDS[name]
    blank = {"keys": None, "num_bullets": None, "max_words": None}
    return {"prompt": template.format(topic=topic), "kind": name, "topic": topic, **blank, **arguments}
