"""Reads blocks from disk before they are needed."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from hetero.engine.stats import EngineStats
from hetero.engine.tiers.block_file import BlockName
from hetero.engine.tiers.directory import BlockDirectory
from hetero.engine.tiers.fetch import Arrived, Fetch
from hetero.engine.tiers.pace import Pace
from hetero.kernels.batch import KV_BLOCK


@dataclass(frozen=True, slots=True)
class _Look:
    """Count how many of these are there, without reading them."""

    names: Sequence[BlockName]


class Loader:
    """A thread that serves fetches in the order in which they come.

    Args:
        directory: where the blocks are.
        stats: gets disk_found and disk_refused.
        bytes_per_block: payload of one block.
        depth: most blocks that lie in RAM, read and not yet taken.
    """

    def __init__(
        self, directory: BlockDirectory, stats: EngineStats, bytes_per_block: int, depth: int
    ) -> None:
        self.pace = Pace()
        self._room = threading.Semaphore(depth)
        self._queue: queue.SimpleQueue[Fetch | _Look | None] = queue.SimpleQueue()
        serve = _Server(directory, stats, bytes_per_block, self.pace)
        thread = threading.Thread(target=serve.run, args=(self._queue,), name="hetero-kv-loader", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._queue, thread)
        """End the thread; also when nobody holds the loader any more."""

    def fetch(self, names: Sequence[BlockName]) -> Fetch:
        """Begin to read blocks, up to the first that is not there."""
        fetch = Fetch(names, self._room)
        self._queue.put(fetch)
        return fetch

    def look(self, names: Sequence[BlockName]) -> None:
        """Count blocks as found without reading them."""
        self._queue.put(_Look(names))


class _Server:
    def __init__(
        self, directory: BlockDirectory, stats: EngineStats, bytes_per_block: int, pace: Pace
    ) -> None:
        self._directory = directory
        self._stats = stats
        self._bytes_per_block = bytes_per_block
        self._pace = pace

    def run(self, jobs: queue.SimpleQueue[Fetch | _Look | None]) -> None:
        while (job := jobs.get()) is not None:
            if isinstance(job, _Look):
                for name in job.names:
                    if not self._directory.has(name):
                        break
                    self._stats.disk_found += KV_BLOCK
                continue
            for name in job.names:
                if not self._read(name, job):
                    break
            job.finish()

    def _read(self, name: BlockName, fetch: Fetch) -> bool:
        if not fetch.reserve():
            return False
        began = perf_counter()
        try:
            payload = np.empty(self._bytes_per_block, np.uint8)
            found = self._directory.load(name, payload)
        except MemoryError:
            found = False
        if not found:
            fetch.give_back()
            self._stats.disk_refused += found is False
            return False
        seconds = perf_counter() - began
        self._pace.add(seconds)
        self._stats.disk_found += KV_BLOCK
        fetch.put(Arrived(name, payload, seconds))
        return True


def _end(jobs: queue.SimpleQueue[Fetch | _Look | None], thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()
