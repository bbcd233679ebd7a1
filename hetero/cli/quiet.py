"""Keeps other libraries' progress bars and notices off the terminal: what matters we say ourselves."""

from __future__ import annotations

import os

from transformers.utils import logging


def quiet_libraries() -> None:
    """Silence Transformers unless HETERO_DEBUG=1."""
    if os.environ.get("HETERO_DEBUG") != "1":
        logging.set_verbosity_error()
        logging.disable_progress_bar()
