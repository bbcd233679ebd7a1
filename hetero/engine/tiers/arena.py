"""Blocks that the pool had no room for, in RAM."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hetero.engine.kv_cache import BlockStore, Namespace


@dataclass(slots=True)
class _Entry:
    slot: int
    used: int


class Arena:
    """Copies of blocks by namespace and content id; the one used longest ago makes room.

    What a retired namespace left is never found, and goes first; retiring costs nothing.

    Args:
        store: the pool, for which it keeps blocks.
        budget: most bytes of all copies; allocated here, but taken from the machine as they are filled (at
            once where a GPU copies from it).
    """

    def __init__(self, store: BlockStore, budget: int) -> None:
        self._store = store
        num_slots = budget // store.bytes_per_block
        self._data: npt.NDArray[np.uint8] = torch.empty(
            (num_slots, store.bytes_per_block), dtype=torch.uint8, pin_memory=store.on_gpu
        ).numpy()
        self._free = list(range(num_slots - 1, -1, -1))
        self._tables: dict[Namespace, OrderedDict[bytes, _Entry]] = {}  # each by time of use
        self._clock = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def has(self, namespace: Namespace, content_id: bytes) -> bool:
        """Whether the block is here."""
        return namespace.alive and content_id in self._tables.get(namespace, ())

    def put(self, namespace: Namespace, content_id: bytes, block: int) -> bool:
        """Keep a copy of a block of the pool; whether one was made: not of what is here, nor without room."""
        if self._touch(namespace, content_id) is not None:
            return False
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return False
        self._store.read_block(block, self._data[slot])
        self._tables.setdefault(namespace, OrderedDict())[content_id] = _Entry(slot, next(self._clock))
        return True

    def get(self, namespace: Namespace, content_id: bytes, block: int) -> bool:
        """Fill a block of the pool with the copy; False when there is none."""
        entry = self._touch(namespace, content_id) if namespace.alive else None
        if entry is not None:
            self._store.write_block(block, self._data[entry.slot])
        return entry is not None

    def clear(self) -> None:
        """Forget everything."""
        for table in self._tables.values():
            self._free += [entry.slot for entry in table.values()]
        self._tables.clear()

    def _touch(self, namespace: Namespace, content_id: bytes) -> _Entry | None:
        table = self._tables.get(namespace)
        entry = None if table is None else table.get(content_id)
        if table is not None and entry is not None:
            table.move_to_end(content_id)
            entry.used = next(self._clock)
        return entry

    def _evict(self) -> int | None:
        if not self._tables:
            return None
        space = min(self._tables, key=lambda s: (s.alive, next(iter(self._tables[s].values())).used))
        _, entry = self._tables[space].popitem(last=False)
        if not self._tables[space]:
            del self._tables[space]
        return entry.slot
