"""The texts of the programs that run inside boxes."""

from __future__ import annotations

from pathlib import Path

_INSIDE = Path(__file__).resolve().parent / "inside"


def text_of(name: str) -> str:
    """Source of `inside/<name>.py` with what it imports from `inside` in front; for `python3 -c`."""
    own = (_INSIDE / f"{name}.py").read_text(encoding="utf-8")
    shared = (_INSIDE / "values.py").read_text(encoding="utf-8")
    lines = [row for row in own.splitlines() if not row.startswith(("from hetero.", "from __future__"))]
    return shared + "\n" + "\n".join(lines) + "\n"


ANSWER = text_of("answer")
TESTER = text_of("tester")
REPL = text_of("repl")
