from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mock_runner import MockStore

from hetero.engine.kv_cache import BlockManager, Namespace, extend_hashes
from hetero.kernels.batch import KV_BLOCK

NUM_BLOCKS = 7
SPACES = ["base", "policy:1", "policy:2"]


class Accounting(RuleBasedStateMachine):
    """The manager against lists that say plainly who holds what and what was released when."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MockStore(NUM_BLOCKS)
        self.manager = BlockManager(self.store)
        self.holds: list[list[int]] = []  # one entry per holder: its blocks
        self.content: dict[int, tuple[str, bytes]] = {}  # findable blocks, held or idle
        self.stale: set[int] = set()  # held, with content of a retired namespace: never findable again
        self.idle: list[int] = []  # findable and not held, oldest release first
        self.lost: set[int] = set()  # idle in a retired namespace

    def held(self) -> set[int]:
        return {block for blocks in self.holds for block in blocks}

    @rule()
    def allocate(self) -> None:
        free = NUM_BLOCKS - len(self.held())
        blank = free - len(self.idle) - len(self.lost)
        block = self.manager.allocate()
        if free == 0:
            assert block is None
            return
        assert block is not None
        assert block not in self.held()
        if blank:
            assert block not in self.idle
            assert block not in self.lost
        elif self.lost:
            assert block in self.lost
            self.lost.remove(block)
        else:
            assert block == self.idle.pop(0)
            del self.content[block]
        self.holds.append([block])

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.manager.release(blocks)
        for block in reversed(blocks):
            if block not in self.held():
                self.stale.discard(block)
                if block in self.content:
                    self.idle.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), name=st.sampled_from(SPACES), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, name: str, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        self.manager.register(self.manager.namespace(name), key, block)
        if block not in self.content and block not in self.stale and (name, key) not in self.content.values():
            self.content[block] = (name, key)

    @rule(name=st.sampled_from(SPACES), keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True))
    def find(self, name: str, keys: list[bytes]) -> None:
        expected = []
        for key in keys:
            block = next((b for b, content in self.content.items() if content == (name, key)), None)
            if block is None:
                break
            expected.append(block)
        assert self.manager.find(self.manager.namespace(name), keys) == expected
        if expected:
            self.holds.append(expected)
            self.idle = [block for block in self.idle if block not in expected]

    @rule(name=st.sampled_from(SPACES))
    def retire(self, name: str) -> None:
        self.manager.retire(name)
        gone = {block for block, (space, _) in self.content.items() if space == name}
        self.lost |= gone & set(self.idle)
        self.stale |= gone & self.held()
        self.idle = [block for block in self.idle if block not in gone]
        self.content = {block: content for block, content in self.content.items() if block not in gone}

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def make_private(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holds))
        block = holder[-1]
        shared = sum(other.count(block) for other in self.holds) > 1
        copies = len(self.store.copied)
        new = self.manager.make_private(block)
        if not shared:
            assert new == block
            assert len(self.store.copied) == copies
        elif new is None:
            assert len(self.held()) == NUM_BLOCKS
        else:
            assert self.store.copied[copies:] == [(block, new)]
            assert new not in self.held()
            if new in self.idle:
                assert new == self.idle.pop(0)
                del self.content[new]
            self.lost.discard(new)
            holder[-1] = new

    @invariant()
    def counts_agree(self) -> None:
        held = self.held()
        assert self.manager.num_free == NUM_BLOCKS - len(held)
        for block in range(NUM_BLOCKS):
            assert self.manager.references(block) == sum(blocks.count(block) for blocks in self.holds)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_block_id_covers_parent_tokens_and_namespace() -> None:
    tokens = list(range(3 * KV_BLOCK + 5))
    ids: list[bytes] = []
    extend_hashes(ids, Namespace("base"), tokens, 2)
    first_two = list(ids)
    extend_hashes(ids, Namespace("base"), tokens, 3)
    assert ids[:2] == first_two
    assert len(ids) == 3
    assert all(len(i) == 16 for i in ids)
    for change, first_difference in ((0, 0), (KV_BLOCK, 1), (3 * KV_BLOCK - 1, 2)):
        other: list[bytes] = []
        extend_hashes(other, Namespace("base"), [t + (i == change) for i, t in enumerate(tokens)], 3)
        assert [a == b for a, b in zip(ids, other, strict=True)] == [i < first_difference for i in range(3)]
    elsewhere: list[bytes] = []
    extend_hashes(elsewhere, Namespace("policy:1"), tokens, 3)
    assert not set(ids) & set(elsewhere)


def test_block_ids_are_the_same_in_every_process() -> None:
    """They follow from bytes alone: nothing of Python's salted hashes or of object identity."""
    got: list[bytes] = []
    extend_hashes(got, Namespace("policy:3"), list(range(64)), 2)
    expected = hashlib.blake2b(b"policy:3", digest_size=16).digest()
    for i, start in enumerate((0, 32)):
        words = b"".join(token.to_bytes(8, "little") for token in range(start, start + 32))
        expected = hashlib.blake2b(expected + words, digest_size=16).digest()
        assert got[i] == expected


def test_retiring_takes_the_same_time_for_any_number_of_blocks() -> None:
    """Counted in touched blocks: none changes hands or is written."""
    manager = BlockManager(MockStore(512))
    space = manager.namespace("policy:1")
    blocks = [manager.allocate() for _ in range(512)]
    ids: list[bytes] = []
    extend_hashes(ids, space, list(range(512 * KV_BLOCK)), 512)
    for block, content in zip(blocks, ids, strict=True):
        manager.register(space, content, block)
    manager.release(blocks)
    idle = space.idle
    manager.retire("policy:1")
    assert space.idle is idle
    assert len(idle) == 512
    assert manager.num_free == 512
    assert manager.find(manager.namespace("policy:1"), ids) == []
    assert {manager.allocate() for _ in range(512)} == set(range(512))


def test_a_retired_namespace_or_a_foreign_block_is_refused_and_counted() -> None:
    manager = BlockManager(MockStore(4))
    old = manager.namespace("policy:1")
    block = manager.allocate()
    manager.register(old, b"x", block)
    manager.retire("policy:1")
    assert manager.take_num_refused() == 0
    assert manager.find(old, [b"x"]) == []
    assert manager.take_num_refused() == 1
    new = manager.namespace("policy:2")
    new.table[b"x"] = block  # what a bug would do
    assert manager.find(new, [b"x"]) == []
    assert manager.take_num_refused() == 1


def test_a_findable_block_is_offered_before_it_is_given_away_unless_its_namespace_is_gone() -> None:
    spilled: list[tuple[str, bytes, int]] = []
    manager = BlockManager(
        MockStore(3), spill=lambda space, key, block: spilled.append((space.name, key, block))
    )
    blocks = [manager.allocate() for _ in range(3)]
    for name, key, block in zip(("base", "policy:1", "base"), (b"a", b"b", b"c"), blocks, strict=True):
        manager.register(manager.namespace(name), key, block)
    manager.release(blocks)
    manager.retire("policy:1")
    assert {manager.allocate() for _ in range(3)} == set(blocks)
    assert spilled == [("base", b"c", blocks[2]), ("base", b"a", blocks[0])]
