"""Finding blocks for a sequence that is about to run: cached ones first, then new ones."""

from __future__ import annotations

from hetero.engine.held import HeldPrompts
from hetero.engine.kv_cache import BlockManager, extend_hashes
from hetero.engine.sequence import Sequence
from hetero.engine.tiers.tiers import Tiers
from hetero.kernels.batch import KV_BLOCK


class Admission:
    """Args:
    blocks: the KV cache.
    held: prompts whose blocks can be had back.
    tiers: where evicted blocks may be.
    """

    def __init__(self, blocks: BlockManager, held: HeldPrompts, tiers: Tiers) -> None:
        self._blocks = blocks
        self._held = held
        self._tiers = tiers

    def prefetch(self, sequence: Sequence) -> None:
        """A sequence has been queued: begin to bring its blocks from disk."""
        if self._tiers.on_disk:
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
        found = self._blocks.find(namespace, findable)
        num_new = -(-len(sequence.token_ids) // KV_BLOCK) - len(found)
        while self._blocks.num_free < num_new + num_running:
            if not may_drop or not self._held.drop():
                self._blocks.release(found)
                return None
        new: list[int] = []
        for _ in range(num_new):
            block = self._blocks.allocate()
            assert block is not None
            new.append(block)
        restored = self._tiers.restore(self._blocks, namespace, findable[len(found) :], new, sequence.fetch)
        sequence.fetch = None
        sequence.num_computed = (len(found) + restored) * KV_BLOCK
        return found + new

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
