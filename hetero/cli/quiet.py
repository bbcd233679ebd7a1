"""Keeps other libraries' progress bars and notices off the terminal: what matters we say ourselves."""

from __future__ import annotations

import os
import warnings

from transformers.utils import logging


def quiet_libraries() -> None:
    """Silence Transformers, and print warnings as plain sentences, unless HETERO_DEBUG=1."""
    if os.environ.get("HETERO_DEBUG") != "1":
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        warnings.formatwarning = lambda message, *where, **line: f"warning: {message}\n"
