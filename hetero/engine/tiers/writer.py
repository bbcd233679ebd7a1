"""Writes blocks to disk behind the engine's back."""

from __future__ import annotations

import queue
import threading
import weakref

import numpy as np
import numpy.typing as npt

from hetero.engine.stats import EngineStats
from hetero.engine.tiers.block_file import BlockName
from hetero.engine.tiers.directory import BlockDirectory

Job = tuple[BlockName, npt.NDArray[np.uint8]]


class Writer:
    """A thread and a queue of at most `depth` blocks; when it is full, blocks are dropped, and counted."""

    def __init__(self, directory: BlockDirectory, stats: EngineStats, depth: int) -> None:
        self._stats = stats
        self._queue: queue.Queue[Job | None] = queue.Queue(depth)
        self._thread = threading.Thread(
            target=_run, args=(directory, stats, self._queue), name="hetero-kv-writer", daemon=True
        )
        self._thread.start()
        self.close = weakref.finalize(self, _end, self._queue, self._thread)
        """Write what is queued and end the thread; also when nobody holds the writer any more."""

    @property
    def full(self) -> bool:
        """Whether the next block would be dropped."""
        return self._queue.full()

    def offer(self, name: BlockName, data: npt.NDArray[np.uint8]) -> None:
        """Queue a block, whose `data` is the writer's from now on."""
        self._queue.put((name, data))

    def flush(self) -> None:
        """Wait until everything offered so far is written or given up."""
        self._queue.join()


def _run(directory: BlockDirectory, stats: EngineStats, jobs: queue.Queue[Job | None]) -> None:
    while True:
        job = jobs.get()
        try:
            if job is None:
                return
            stats.disk_written += directory.store(*job)
        except (OSError, MemoryError):  # full, read-only, gone: the block is computed again when it is needed
            stats.disk_errors += 1
        finally:
            jobs.task_done()


def _end(jobs: queue.Queue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()
