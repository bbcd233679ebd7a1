"""Numbers and texts as people read them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any


def short(value: float | None) -> str:
    """A number in about three significant digits: 0.123, 1.2e-05, 12.3k, 4.56M."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e12:
        return f"{value:.2e}"
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"


def fixed(value: float | None, digits: int = 3) -> str:
    """A number between 0 and about 1 with a fixed number of digits; a large one as `short` writes it."""
    if value is None or not math.isfinite(value) or abs(value) >= 1e4:
        return short(value)
    return f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """12.3 s, 4:05, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def time_parts(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by what they went to. Saving comes after the step and is not in `time/step`."""

    def seconds(name: str) -> float:
        value = metrics.get(f"time/{name}")
        return float(value) if isinstance(value, (int, float)) else 0.0

    parts = {name: seconds(name) for name in ("rollout", "reward", "train")}
    other = max(seconds("step") - sum(parts.values()), 0.0)
    return {**parts, "save": seconds("save"), "other": other}


def visible(text: Any, longest: int | None = None) -> str:
    """A text on one line without anything that a terminal would obey: a model's text is not to be trusted."""
    shown = "".join(_visible_character(c) for c in str(text).strip())
    if longest is not None and len(shown) > longest:
        return shown[: longest - 1] + "…"
    return shown


def _visible_character(character: str) -> str:
    if character == "\n":
        return " ⏎ "
    if character == "\t":
        return " "
    if character == "\x1b":
        return "␛"
    # Control, format (right-to-left overrides among them), surrogate, private, unassigned; other line ends.
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "·" if hidden else character
