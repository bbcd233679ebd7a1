"""What all sections share: strict types, no unknown keys, docstrings that become descriptions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One mapping of a recipe. Values are immutable and never coerced: `"8"` is text, not a number."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def one_of(value: str, names: Iterable[str], what: str) -> str:
    """Return `value` if it is one of `names`; else ValueError with the nearest match and all names."""
    known = sorted(names)
    if value in known:
        return value
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ValueError(f"is {value!r}, which is not {what}. {hint}There are: {', '.join(known)}.")
