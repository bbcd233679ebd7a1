"""Python and the libraries, against the bounds of the package."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from hetero.doctor.finding import Finding, judge

PYTHON = "3.10"
BOUNDS = {
    "torch": "2.6",
    "transformers": "5.20",
    "safetensors": "0.5",
    "numpy": "1.26",
    "pydantic": "2.7",
}
"""Lower bounds; the same as in pyproject.toml, which a test compares."""


def check_versions() -> Iterator[Finding]:
    """One finding for Python, one for each library."""
    yield _judge("python", platform.python_version(), PYTHON, f"Install Python {PYTHON} or newer.")
    for name, bound in BOUNDS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        yield _judge(name, found, bound, f"pip install --upgrade '{name}>={bound}'")


def _judge(name: str, found: str, bound: str, fix: str) -> Finding:
    return judge(f"versions/{name}", _numbers(found) >= _numbers(bound), found, f"needs >= {bound}. {fix}")


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 6) of "2.6+cpu"; () of what is no version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
