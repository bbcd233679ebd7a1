"""The tiers below the pool, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

import numpy as np

from hetero.engine.kv_cache import BlockManager, BlockStore, Namespace
from hetero.engine.stats import EngineStats
from hetero.engine.tiers.arena import Arena
from hetero.engine.tiers.block_file import BlockName
from hetero.engine.tiers.directory import BlockDirectory
from hetero.engine.tiers.fetch import Fetch
from hetero.engine.tiers.loader import Loader
from hetero.engine.tiers.pace import Pace
from hetero.engine.tiers.writer import Writer
from hetero.kernels.batch import KV_BLOCK

_STAGING = 64 << 20
"""Bytes of blocks between RAM and disk, each way."""
_PROBE = 16
"""While a tier is slower than computing, every so many prompts it is measured again."""
_UNKNOWN = 5.0
"""Seconds to wait for blocks while the speed of prefill is not known."""


class Tiers:
    """Takes blocks that the pool gives away or has filled, and gives them back where that is faster than
    computing them.

    Args:
        store: the pool.
        stats: counts what happens here; its prefill speed says what computing costs.
        ram: bytes of the arena; 0 is none.
        directory: of the disk tier, or None.
    """

    def __init__(
        self,
        store: BlockStore,
        stats: EngineStats,
        *,
        ram: int = 0,
        directory: BlockDirectory | None = None,
    ) -> None:
        self._store = store
        self._stats = stats
        self._arena = Arena(store, ram) if ram else None
        self._arena_pace = Pace()
        self._directory = directory
        self._skipped = 0
        depth = max(4, _STAGING // store.bytes_per_block)
        if directory is not None:
            self._writer = Writer(directory, stats, depth)
            self._loader = Loader(directory, stats, store.bytes_per_block, depth)

    @property
    def on_disk(self) -> bool:
        """Whether blocks outlive this process, so that namespaces need roots that mean the same in others."""
        return self._directory is not None

    # --- down

    def spill(self, namespace: Namespace, content_id: bytes, block: int) -> None:
        """The pool is about to give a findable block away: keep a copy in RAM."""
        if self._arena is not None:
            self._stats.ram_stored += self._arena.put(namespace, content_id, block)

    def commit(self, filled: Iterable[tuple[Namespace, bytes, int]]) -> None:
        """Blocks that a forward pass has just filled: write them through to disk, in the background."""
        if self._directory is None:
            return
        for namespace, content_id, block in filled:
            if not namespace.shared:
                continue
            name = BlockName(namespace.root, content_id)
            if self._directory.has(name):
                continue
            if self._writer.full:
                self._stats.disk_dropped += 1
                continue
            data = np.empty(self._store.bytes_per_block, np.uint8)
            self._store.read_block(block, data)
            self._writer.offer(name, data)

    def clear(self) -> None:
        """Forget what lies in RAM. Files stay: their names say what they hold."""
        if self._arena is not None:
            self._arena.clear()

    def close(self) -> None:
        """Finish writing and end the threads."""
        if self._directory is not None:
            self._writer.close()
            self._loader.close()

    # --- up

    def prefetch(self, namespace: Namespace, content_ids: Sequence[bytes]) -> Fetch | None:
        """Begin to read from disk what neither the pool nor the arena has of a prefix."""
        if self._directory is None or not namespace.shared:
            return None
        here = (
            i
            for i, c in enumerate(content_ids)
            if c not in namespace.table and not self._in_arena(namespace, c)
        )
        names = [BlockName(namespace.root, c) for c in content_ids[next(here, len(content_ids)) :]]
        if not names:
            return None
        if not self._pays(self._loader.pace):
            self._loader.look(names)
            return None
        return self._loader.fetch(names)

    def ready(self, fetch: Fetch) -> bool:
        """Whether there is no use in waiting: all that can be there is, or computing would be done by now."""
        if fetch.deadline is None:
            fetch.deadline = self._deadline(len(fetch.names))
        return fetch.settled or perf_counter() > fetch.deadline

    def restore(
        self,
        manager: BlockManager,
        namespace: Namespace,
        content_ids: Sequence[bytes],
        blocks: Sequence[int],
        fetch: Fetch | None,
    ) -> int:
        """Fill `blocks` with the beginning of a prefix; how many of them were filled, and made findable.

        Waits for the disk no longer than computing the same blocks would take.
        """
        if fetch is not None:
            fetch.deadline = self._deadline(len(content_ids))
        count = 0
        for content_id, block in zip(content_ids, blocks, strict=False):
            if not self._from_arena(namespace, content_id, block) and not (
                fetch is not None and self._from_disk(fetch, namespace, content_id, block)
            ):
                break
            manager.register(namespace, content_id, block)
            count += 1
        if fetch is not None:
            fetch.cancel()
        return count

    def _from_arena(self, namespace: Namespace, content_id: bytes, block: int) -> bool:
        if self._arena is None or not self._arena.has(namespace, content_id):
            return False
        self._stats.ram_found += KV_BLOCK
        if not self._pays(self._arena_pace):
            return False
        began = perf_counter()
        self._arena.get(namespace, content_id, block)
        seconds = perf_counter() - began
        self._arena_pace.add(seconds)
        self._stats.ram_in_time += KV_BLOCK
        self._stats.ram_faster += KV_BLOCK * self._is_faster(seconds)
        return True

    def _from_disk(self, fetch: Fetch, namespace: Namespace, content_id: bytes, block: int) -> bool:
        arrived = fetch.take(BlockName(namespace.root, content_id))
        if arrived is None:
            return False
        self._store.write_block(block, arrived.payload)
        self._stats.disk_in_time += KV_BLOCK
        self._stats.disk_faster += KV_BLOCK * self._is_faster(arrived.seconds)
        return True

    def _in_arena(self, namespace: Namespace, content_id: bytes) -> bool:
        return self._arena is not None and self._arena.has(namespace, content_id)

    # --- is it worth it?

    def _recompute_seconds(self) -> float | None:
        """Of one block, by the engine's own prefill so far; None before there was any."""
        tokens = self._stats.prefill_tokens
        return KV_BLOCK * self._stats.prefill_seconds / tokens if tokens else None

    def _deadline(self, num_blocks: int) -> float:
        """When blocks would be computed if that were begun now."""
        recompute = self._recompute_seconds()
        return perf_counter() + (_UNKNOWN if recompute is None else num_blocks * recompute)

    def _is_faster(self, seconds: float) -> bool:
        recompute = self._recompute_seconds()
        return recompute is None or seconds < recompute

    def _pays(self, pace: Pace) -> bool:
        """Whether a tier is faster than computing, or is to be measured again."""
        if pace.seconds is None or self._is_faster(pace.seconds):
            return True
        self._skipped += 1
        return self._skipped % _PROBE == 0
