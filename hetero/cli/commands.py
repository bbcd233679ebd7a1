"""Loads the module of a command when it is run, so that `hetero --help` does not wait for PyTorch."""

from __future__ import annotations

import importlib
from typing import Any


def command(name: str, /, **arguments: Any) -> Any:
    """Call `hetero.cli.<name>.run(**arguments)`."""
    return importlib.import_module(f"hetero.cli.{name}").run(**arguments)
