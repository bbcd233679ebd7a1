"""The tiers that an engine's arguments ask for."""

from __future__ import annotations

import os

from hetero.engine.kv_cache import BlockStore
from hetero.engine.params import parse_bytes
from hetero.engine.stats import EngineStats
from hetero.engine.tiers.directory import BlockDirectory
from hetero.engine.tiers.tiers import Tiers
from hetero.errors import CapacityError


def make_tiers(
    store: BlockStore,
    stats: EngineStats,
    *,
    ram: int | str,
    disk: str | os.PathLike[str] | None,
    disk_size: int | str,
) -> Tiers:
    """See `Engine`: kv_ram, kv_disk and kv_disk_size. Raises CapacityError and UnavailableError."""
    arena, block = parse_bytes(ram), store.bytes_per_block
    if 0 < arena < block:
        raise CapacityError(
            f"kv_ram is {arena} bytes; one block of this model's KV cache takes {block}. Give it at least "
            "some hundred blocks, or 0 for none."
        )
    directory = None
    if disk is not None:
        directory = BlockDirectory(disk, budget=parse_bytes(disk_size), bytes_per_block=block)
    return Tiers(store, stats, ram=arena, directory=directory)
