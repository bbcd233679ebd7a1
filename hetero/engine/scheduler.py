"""Which tokens the next forward pass computes.

Every step first feeds one token of each decoding sequence, then up to `prefill_chunk` prompt tokens, first
come first served. Identical prompts are computed by one sequence, the leader; the others wait for it and
then fork: they take references to its blocks and draw their first token from its last hidden state. When the
blocks run out, the youngest sequence gives its blocks back and is computed again later. Nothing here changes
a result: the arithmetic of a token does not depend on its neighbours in the batch, and each sequence has its
own random stream.
"""

from __future__ import annotations

import itertools
from bisect import insort
from operator import attrgetter

import torch

from hetero.engine.admission import Admission
from hetero.engine.batch import Chunk, Step
from hetero.engine.held import HeldPrompts
from hetero.engine.kv_cache import BlockManager, Namespace, extend_hashes
from hetero.engine.sequence import Routes, Sequence, Status
from hetero.engine.session import Resting
from hetero.engine.slots import Slots
from hetero.engine.tiers.tiers import Tiers
from hetero.kernels.batch import KV_BLOCK

_arrival = attrgetter("arrival")


class Scheduler:
    """Admits, continues, forks and preempts sequences.

    Args:
        blocks: the KV cache.
        tiers: where its blocks go that it has no room for.
        slots: rows for the sequences that run.
        prefill_chunk: prompt tokens per step.

    Attributes:
        resting: sessions that do not run, and hold blocks.
    """

    def __init__(self, blocks: BlockManager, tiers: Tiers, slots: Slots, *, prefill_chunk: int) -> None:
        self._num_preemptions = 0
        self._filled: list[tuple[Namespace, bytes, int]] = []
        self._blocks = blocks
        self._prefill_chunk = prefill_chunk
        self._arrivals = itertools.count()
        self._slots = slots
        self._waiting: list[Sequence] = []  # each list by arrival
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._held = HeldPrompts(blocks)
        self.resting = Resting(blocks)
        self._admission = Admission(blocks, self._held, self.resting, tiers)

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not finished."""
        return self._decoding + self._prefilling + self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival = next(self._arrivals)
        self._waiting.append(sequence)
        if sequence.prompt.num_unstarted == 0:
            self._admission.prefetch(sequence)
        sequence.prompt.num_unstarted += 1

    def schedule(self) -> Step:
        """Choose the next step's tokens and give them blocks."""
        return Step(self._schedule_decodes(), self._schedule_chunks())

    def take_num_preemptions(self) -> int:
        """Preemptions since the last call."""
        count, self._num_preemptions = self._num_preemptions, 0
        return count

    def take_filled(self) -> list[tuple[Namespace, bytes, int]]:
        """(namespace, content id, block) of what the scheduled steps fill, since the last call."""
        filled, self._filled = self._filled, []
        return filled

    # --- decode

    def _schedule_decodes(self) -> list[Sequence]:
        i = 0
        while i < len(self._decoding):  # preemption takes from the end, or the sequence itself
            i += self._reserve(self._decoding[i])
        for sequence in self._decoding:
            self._advance(sequence, sequence.num_computed + 1)
        return list(self._decoding)

    def _reserve(self, sequence: Sequence) -> bool:
        """Make the position of the next token writable; False when the sequence had to be preempted."""
        index, offset = divmod(sequence.num_computed, KV_BLOCK)
        while True:
            if offset:
                block = self._blocks.make_private(sequence.blocks[index])
            else:
                block = self._blocks.allocate()
            if block is not None:
                self._slots.set(sequence, index, block)
                return True
            if not self.resting.drop_oldest() and not self._held.drop():
                victim = max(self._decoding[-1:] + self._prefilling[-1:], key=_arrival)
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        self._num_preemptions += 1
        self._stop_running(sequence)
        sequence.status = Status.WAITING
        sequence.prompt.num_unstarted += sequence.fresh
        self._admission.prefetch(sequence)
        insort(self._waiting, sequence, key=_arrival)

    def _advance(self, sequence: Sequence, end: int) -> None:
        """Count tokens up to `end` as computed and make the blocks that they fill findable.

        This happens before the forward pass: a pass writes the keys and values of all its tokens before it
        reads any, so that a sequence may share a block that another one fills in the same pass.
        """
        first, last = sequence.num_computed // KV_BLOCK, end // KV_BLOCK
        sequence.num_computed = end
        if first < last:
            space = sequence.prompt.namespace
            extend_hashes(sequence.hashes, space, sequence.token_ids, last)
            for i in range(first, last):
                if self._blocks.register(space, sequence.hashes[i], sequence.blocks[i]):
                    self._filled.append((space, sequence.hashes[i], sequence.blocks[i]))

    # --- prefill

    def _schedule_chunks(self) -> list[Chunk]:
        budget = self._prefill_chunk
        chunks: list[Chunk] = []
        for sequence in list(self._prefilling):
            if budget:
                chunks.append(self._next_chunk(sequence, budget))
                budget -= chunks[-1].end - chunks[-1].start
        room, i = self._slots.num_free, 0
        while budget and room and i < len(self._waiting):
            sequence = self._waiting[i]
            room -= 1  # a sequence that waits for its leader keeps its place in the order
            if sequence.fresh and (sequence.prompt.leader is not None or sequence.prompt.blocks is not None):
                i += 1
                continue
            busy = bool(self._decoding or self._prefilling or chunks)
            if (busy and not self._admission.ready(sequence)) or not self._admit(sequence):
                break
            del self._waiting[i]
            chunks.append(self._next_chunk(sequence, budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _next_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + budget)
        self._advance(sequence, end)
        last = end == len(sequence.token_ids)
        if last:
            self._prefilling.remove(sequence)
            self._start_decoding(sequence)
        return Chunk(sequence, start, end, last)

    def _start_decoding(self, sequence: Sequence) -> None:
        sequence.status = Status.DECODE
        insort(self._decoding, sequence, key=_arrival)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and blocks for all its tokens; False when there is no room."""
        alone = not (self._decoding or self._prefilling)
        blocks = self._admission.claim(sequence, num_running=len(self._decoding), may_drop=alone)
        if blocks is None:
            return False
        if sequence.fresh:
            sequence.prompt.leader = sequence
            sequence.prompt.num_unstarted -= 1
            sequence.num_cached_tokens = sequence.num_computed
        self._slots.take(sequence, blocks)
        sequence.status = Status.PREFILL
        insort(self._prefilling, sequence, key=_arrival)
        return True

    # --- forks

    def hold(self, leader: Sequence, hidden: torch.Tensor, route: Routes | None) -> None:
        """The leader's last chunk is computed, ending in hidden [H] by the experts of `route`: keep that for
        those who wait for it."""
        self._held.hold(leader, hidden, route)

    def fork_waiting(self) -> list[Sequence]:
        """Start the sequences whose prompt has been computed; they draw from `prompt.hidden` in this step."""
        forks: list[Sequence] = []
        room, i = self._slots.num_free, 0
        while self._held and room and i < len(self._waiting):
            sequence = self._waiting[i]
            room -= 1
            crowded = self._decoding and self._blocks.num_free <= len(self._decoding)
            if sequence.fresh and sequence.prompt.blocks is not None and not crowded:
                del self._waiting[i]
                self._fork(sequence)
                forks.append(sequence)
            else:
                i += 1
        return forks

    def _fork(self, sequence: Sequence) -> None:
        prompt = sequence.prompt
        assert prompt.blocks is not None
        self._blocks.acquire(prompt.blocks)
        self._slots.take(sequence, list(prompt.blocks))
        sequence.hashes = list(prompt.hashes)
        sequence.num_computed = sequence.num_cached_tokens = len(prompt.token_ids)
        self._start_decoding(sequence)
        prompt.num_unstarted -= 1
        self._held.let_go(prompt)

    # --- coming and going

    def _stop_running(self, sequence: Sequence) -> None:
        (self._prefilling if sequence.status is Status.PREFILL else self._decoding).remove(sequence)
        self._blocks.release(self._slots.give_back(sequence))
        if sequence.prompt.leader is sequence:
            sequence.prompt.leader = None

    def remove(self, sequence: Sequence) -> None:
        """Let go of a sequence, in whatever state, with all that it holds."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
            if sequence.fetch is not None:
                sequence.fetch.cancel()
            sequence.prompt.num_unstarted -= sequence.fresh
            self._held.let_go(sequence.prompt)
        elif sequence.slot >= 0:
            if sequence.session is not None:
                space = sequence.prompt.namespace
                self.resting.keep(sequence.session, space, sequence.blocks, sequence.num_computed)
            self._stop_running(sequence)
        if sequence.session is not None:
            sequence.session.end()
