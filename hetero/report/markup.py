"""HTML and SVG as text: attributes are always escaped, insides are markup or come from `text`."""

from __future__ import annotations

from html import escape
from typing import Any

_VOID = {"input", "meta"}


def element(name: str, *inside: str, **attributes: Any) -> str:
    """`<name attribute="...">inside</name>`.

    An attribute's name may end in `_` (class_) and has `-` for every other `_` (aria_label). Numbers are
    written briefly. True stands alone, None and False leave the attribute out.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        written.append(label if value is True else f'{label}="{escape(_brief(value))}"')
    head = " ".join([name, *written])
    return f"<{head}>" if name in _VOID else f"<{head}>{''.join(inside)}</{name}>"


def text(value: Any) -> str:
    """Anything as text that no browser takes for markup."""
    return escape(str(value))


def _brief(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
