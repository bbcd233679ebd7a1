"""Run pytest on an extension that was built with sanitizers: sanitized.py EXTENSION [PYTEST ARGUMENTS].

The sanitizers' libraries must be preloaded (see `make sanitize`): Python itself is built without them.
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
    sys.exit(pytest.main(sys.argv[2:]))
