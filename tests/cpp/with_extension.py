"""Run pytest on an extension that is not the installed one: with_extension.py EXTENSION [PYTEST ARGUMENTS].

For `make sanitize` and `make trapped`. Pytest's own fault handler stays out: it would take the signals of
trapped instructions.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def load(extension: Path) -> None:
    """Let `hetero._C` be this file, whichever one is installed."""
    name = "hetero._C"
    spec = importlib.util.spec_from_file_location(name, extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    load(Path(sys.argv[1]).resolve())
    sys.exit(pytest.main(["-p", "no:faulthandler", "-p", "no:cacheprovider", *sys.argv[2:]]))
