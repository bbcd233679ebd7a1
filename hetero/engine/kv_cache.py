"""Accounting of the KV cache: who holds which block, and which blocks hold a known prefix.

The bytes live in a `BlockStore`. A full block has a content id: a 128-bit hash of its parent's id and its
tokens, rooted in a namespace ("base", "policy:7"). The namespace stands for everything else that the keys and
values depend on, so two blocks with one id hold the same bits; where its root is the fingerprint of weights
and arithmetic, that holds across processes too. Blocks are shared by reference count; one that nobody holds
stays findable until its memory is needed, least recently released first. A sequence releases its last block
first, so a prefix outlives what continues it.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hetero.kernels.batch import KV_BLOCK

Bytes = npt.NDArray[np.uint8]
SpillFn = Callable[["Namespace", bytes, int], None]


class BlockStore(Protocol):
    """The memory behind the blocks. Its user clears a block when it writes the first token."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    def copy_block(self, src: int, dst: int) -> None: ...

    def read_block(self, i: int, out: Bytes) -> None:
        """Copy block `i` into `out` [bytes_per_block]."""
        ...

    def write_block(self, i: int, data: Bytes) -> None:
        """Fill block `i` with what `read_block` gave."""
        ...


class Namespace:
    """A part of the cache that is valid, and dropped, as one.

    Attributes:
        name: such as "policy:7".
        root: the id from which the chains of block ids start; by default a hash of the name, which holds
            within one process and engine.
        shared: whether the root was given, so that ids mean the same in other processes.
        table: content id -> block.
        idle: registered blocks that nobody holds -> time of release, oldest first.
        alive: False once retired.
    """

    __slots__ = ("alive", "idle", "name", "root", "shared", "table")

    def __init__(self, name: str, root: bytes | None = None) -> None:
        self.name = name
        self.shared = root is not None
        self.root = blake2b(name.encode(), digest_size=16).digest() if root is None else root
        self.table: dict[bytes, int] = {}
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.alive = True


def extend_hashes(
    hashes: list[bytes], namespace: Namespace, token_ids: Sequence[int], num_blocks: int
) -> None:
    """Append the content ids of the full blocks of `token_ids` until there are `num_blocks`."""
    parent = hashes[-1] if hashes else namespace.root
    for i in range(len(hashes), num_blocks):
        tokens = array("q", token_ids[i * KV_BLOCK : (i + 1) * KV_BLOCK])
        parent = blake2b(parent + tokens.tobytes(), digest_size=16).digest()
        hashes.append(parent)


class BlockManager:
    """Hands out blocks, counts references and finds prefixes.

    A block is in exactly one of four states: held (references > 0), idle in a live namespace (findable),
    idle in a retired one (not findable, reused before any findable block), or blank.

    Args:
        store: the memory.
        root_of: the root of a new namespace, by its name.
        spill: called with (namespace, content id, block) before a findable block is given away.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        root_of: Callable[[str], bytes | None] = lambda name: None,
        spill: SpillFn | None = None,
    ) -> None:
        self._num_refused = 0
        self.store = store
        self.num_blocks = store.num_blocks
        self._blank = list(range(self.num_blocks - 1, -1, -1))
        self._root_of = root_of
        self._spill = spill
        self._references = [0] * self.num_blocks
        self._home: list[Namespace | None] = [None] * self.num_blocks
        self._id: list[bytes | None] = [None] * self.num_blocks
        self._spaces: dict[str, Namespace] = {}
        self._retired: list[OrderedDict[int, int]] = []
        self._clock = itertools.count()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now; findable ones count, they are only kept until needed."""
        idle = sum(len(space.idle) for space in self._spaces.values())
        return len(self._blank) + idle + sum(map(len, self._retired))

    def references(self, block: int) -> int:
        """How many holders a block has."""
        return self._references[block]

    # --- namespaces

    def namespace(self, name: str) -> Namespace:
        """The live namespace of that name, made if there is none."""
        space = self._spaces.get(name)
        if space is None:
            space = self._spaces[name] = Namespace(name, self._root_of(name))
        return space

    def namespaces(self) -> list[str]:
        """Names of the live namespaces."""
        return list(self._spaces)

    def retire(self, name: str) -> None:
        """Make every block of a namespace unfindable, in constant time; those held live on until released."""
        space = self._spaces.pop(name, None)
        if space is not None:
            space.alive = False
            space.table = {}
            if space.idle:
                self._retired.append(space.idle)

    # --- blocks

    def allocate(self) -> int | None:
        """Take a block with one reference and no content id; None when all are held.

        It still holds what its last owner wrote."""
        if self._blank:
            block = self._blank.pop()
        elif self._retired:
            block, _ = self._retired[-1].popitem()
            if not self._retired[-1]:
                self._retired.pop()
        else:
            evicted = self._evict()
            if evicted is None:
                return None
            block = evicted
        self._home[block] = self._id[block] = None
        self._references[block] = 1
        return block

    def _evict(self) -> int | None:
        spaces = [space for space in self._spaces.values() if space.idle]
        if not spaces:
            return None
        oldest = min(spaces, key=lambda space: next(iter(space.idle.values())))
        block, _ = oldest.idle.popitem(last=False)
        content_id = self._id[block]
        assert content_id is not None
        del oldest.table[content_id]
        if self._spill is not None:
            self._spill(oldest, content_id, block)
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are held or findable."""
        for block in blocks:
            if self._references[block] == 0:
                home = self._home[block]
                assert home is not None, "acquire of a block that nobody holds and nobody can find"
                del home.idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block, the last one first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, "release of a block that nobody holds"
            if self._references[block]:
                continue
            home = self._home[block]
            if home is not None and home.alive:
                home.idle[block] = next(self._clock)
            else:
                self._home[block] = self._id[block] = None
                self._blank.append(block)

    def make_private(self, block: int) -> int | None:
        """The block itself when the caller is its only holder, else a copy in its place; None if full."""
        if self._references[block] == 1:
            return block
        copy = self.allocate()
        if copy is not None:
            self.store.copy_block(block, copy)
            self._references[block] -= 1
        return copy

    # --- content

    def register(self, namespace: Namespace, content_id: bytes, block: int) -> bool:
        """Make a full held block findable; whether it is by now: a second block of the same content stays
        private to its holder."""
        fresh = (
            namespace.alive
            and self._home[block] is None
            and namespace.table.setdefault(content_id, block) == block
        )
        if fresh:
            self._home[block], self._id[block] = namespace, content_id
        return fresh

    def find(self, namespace: Namespace, content_ids: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix, a reference taken on each; none in a retired namespace."""
        blocks = []
        self._num_refused += not namespace.alive
        for content_id in content_ids:
            block = namespace.table.get(content_id)
            if block is None:
                break
            if self._home[block] is not namespace or self._id[block] != content_id:
                self._num_refused += 1
                break
            blocks.append(block)
        self.acquire(blocks)
        return blocks

    def take_num_refused(self) -> int:
        """Lookups since the last call in a retired namespace or of a block in a wrong table: 0, or a bug."""
        count, self._num_refused = self._num_refused, 0
        return count
