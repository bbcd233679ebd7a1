"""Python processes that run a module of this package."""

from __future__ import annotations

from pathlib import Path

IMPORT_ROOT = Path(__file__).resolve().parents[2]
"""Working directory of every `python -m hetero.x`.

Python looks for modules in the working directory first, where a checkout of the sources, which has no built
extension, would stand before the installed package.
"""
