"""The command line: `hetero rl | generate | chat | eval | recipes | report | upcycle | bench | doctor`."""

from __future__ import annotations

from hetero.cli.app import main

__all__ = ["main"]
