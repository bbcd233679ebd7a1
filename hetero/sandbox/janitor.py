"""Removes the directories of ended boxes in a thread of its own: on some file systems rmdir waits for all
cores, and while a model trains that takes ten times longer than ending a box."""

from __future__ import annotations

import queue
import secrets
import threading
from pathlib import Path

from hetero.sandbox.launcher import tree

_MOST = 512


class Janitor:
    """Takes directories away at once and removes them a little later, one after the other.

    When very many wait, `take` waits, too.

    Args:
        bin: a directory on the same file system.
    """

    def __init__(self, bin: Path) -> None:
        bin.mkdir(mode=0o700)
        self._bin = bin
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST)
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()

    def take(self, path: Path | str) -> None:
        """A directory that is no longer used; nothing has that name when this returns."""
        gone = self._bin / secrets.token_hex(8)
        try:
            _rename(Path(path), gone)
        except FileNotFoundError:
            return
        with self._guard:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="sandbox-janitor", daemon=True)
                self._thread.start()
        self._waiting.put(str(gone))

    def close(self) -> None:
        """Wait until all is removed."""
        with self._guard:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _work(self) -> None:
        while (path := self._waiting.get()) is not None:
            try:  # noqa: SIM105
                tree.remove(path)
            except OSError:
                pass  # the launcher removes the whole run at its end


def _rename(path: Path, gone: Path) -> None:
    try:
        path.rename(gone)
    except PermissionError:  # what was the root of a box may have any mode
        path.chmod(0o700)
        path.rename(gone)
