"""Finding blocks for a sequence that is about to run: cached ones first, then new ones."""

from __future__ import annotations

from hetero.engine.held import HeldPrompts
from hetero.engine.kv_cache import BlockManager, extend_hashes
from hetero.engine.sequence import Sequence
from hetero.engine.session import Resting
from hetero.engine.tiers.tiers import Tiers
from hetero.kernels.batch import KV_BLOCK


class Admission:
    """Args:
    blocks: the KV cache.
    held: prompts whose blocks can be had back.
    resting: sessions with blocks of their own, which can be had back too.
    tiers: where evicted blocks may be.
    """

    def __init__(self, blocks: BlockManager, held: HeldPrompts, resting: Resting, tiers: Tiers) -> None:
        self._blocks = blocks
        self._held = held
        self._resting = resting
        self._tiers = tiers

    def prefetch(self, sequence: Sequence) -> None:
        """A sequence has been queued: begin to bring its blocks from disk."""
        if self._tiers.on_disk and self._resting.held(sequence.session) is None:
            namespace, hashes = sequence.prompt.namespace, self._hashes(sequence)
            sequence.fetch = self._tiers.prefetch(namespace, hashes[: self._num_findable(sequence)])

    def ready(self, sequence: Sequence) -> bool:
        """Whether there is no use in waiting for blocks from disk."""
        return sequence.fetch is None or self._tiers.ready(sequence.fetch)

    def claim(self, sequence: Sequence, *, num_running: int, may_drop: bool) -> list[int] | None:
        """Blocks for all tokens of a sequence, and its `num_computed`; None when there is no room.

        Args:
            num_running: sequences that run; each may need one more block soon.
            may_drop: take blocks from held prompts.
        """
        namespace, hashes = sequence.prompt.namespace, self._hashes(sequence)
        findable = hashes[: self._num_findable(sequence)]
        found, num_computed = self._found(sequence, findable)
        begun = num_computed % KV_BLOCK > 0
        num_new = -(-len(sequence.token_ids) // KV_BLOCK) - len(found)
        while self._blocks.num_free < num_new + begun + num_running:
            if not self._resting.drop_oldest() and not (may_drop and self._held.drop()):
                self._blocks.release(found)
                return None
        if sequence.session is not None:
            sequence.session.close()
        if begun:
            found[-1] = _there(self._blocks.make_private(found[-1]))
        new = [_there(self._blocks.allocate()) for _ in range(num_new)]
        if not begun:
            missing = findable[len(found) :]
            restored = self._tiers.restore(self._blocks, namespace, missing, new, sequence.fetch)
            num_computed += restored * KV_BLOCK
        sequence.fetch = None
        sequence.num_computed = num_computed
        return found + new

    def _found(self, sequence: Sequence, findable: list[bytes]) -> tuple[list[int], int]:
        """Blocks that hold the beginning of a sequence, a reference taken on each, and how many tokens."""
        kept = self._resting.held(sequence.session)
        if kept is None:
            found = self._blocks.find(sequence.prompt.namespace, findable)
            return found, len(found) * KV_BLOCK
        num_computed = min(kept.num_computed, len(sequence.token_ids) - 1)
        blocks = kept.blocks[: -(-num_computed // KV_BLOCK)]
        self._blocks.acquire(blocks)
        return blocks, num_computed

    def _num_findable(self, sequence: Sequence) -> int:
        """Blocks that can be found: the last token is computed in any case, to draw the next from it."""
        return (len(sequence.token_ids) - 1) // KV_BLOCK

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """Content ids of the full blocks of a sequence that does not run; a prompt's are computed once."""
        prompt, num_full = sequence.prompt, len(sequence.token_ids) // KV_BLOCK
        if sequence.fresh:
            extend_hashes(prompt.hashes, prompt.namespace, prompt.token_ids, num_full)
            sequence.hashes = list(prompt.hashes)
        else:
            extend_hashes(sequence.hashes, prompt.namespace, sequence.token_ids, num_full)
        return sequence.hashes


def _there(block: int | None) -> int:
    assert block is not None, "no block is free, against the count"
    return block
