"""One helper process of a kind per process: started when it is first needed, and again when it has ended."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Helper(Protocol):
    """The owner's end of a helper process."""

    process: subprocess.Popen[bytes]

    def close(self) -> None:
        """End the process."""

    def abandon(self) -> None:
        """Forget it, in a child of its owner, without ending it."""


Kind = TypeVar("Kind", bound=Helper)


class Companion(Generic[Kind]):
    """This process's helper; ended with it, and forgotten in what it forks."""

    def __init__(self, start: Callable[[], Kind]) -> None:
        self._start = start
        self._current: Kind | None = None
        self._guard = threading.Lock()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forked)

    def get(self) -> Kind:
        """The helper, started at the first call, and again if it has ended."""
        with self._guard:
            if self._current is None or self._current.process.poll() is not None:
                if self._current is not None:
                    self._current.close()
                self._current = self._start()
            return self._current

    def stop(self) -> None:
        """End the helper."""
        with self._guard:
            if self._current is not None:
                self._current.close()
                self._current = None

    def _forked(self) -> None:
        self._guard = threading.Lock()
        if self._current is not None:
            self._current.abandon()
            self._current = None
