"""SIGTERM and SIGINT end a run cleanly; a second one ends it at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger(__name__)


class StopRequested(Exception):
    """The run was asked to stop. What it had begun of the next step is dropped, and done again on resume."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stop:
    """Whether somebody asked; looked at wherever a step may be left without a trace."""

    def __init__(self) -> None:
        self.number: int | None = None

    def check(self) -> None:
        """Raise StopRequested if a signal came."""
        if self.number is not None:
            raise StopRequested(self.number)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """While inside, the first SIGTERM or SIGINT only sets the returned Stop; the second acts as usual.

    Outside the main thread, where Python has no signal handlers, nothing is installed.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.number = number
        _log.warning("stopping as soon as possible and saving what is finished; once more ends at once")
        for each, handler in before.items():
            signal.signal(each, handler)

    for each in before:
        signal.signal(each, ask)
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
