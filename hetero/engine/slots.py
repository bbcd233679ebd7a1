"""Rows of the per-sequence arrays, handed out to the sequences that run."""

from __future__ import annotations

import numpy as np

from hetero.engine.sequence import Sequence


class Slots:
    """Args:
        max_num_seqs: rows.
        max_blocks: most blocks that one sequence can need.

    Attributes:
        tables: [max_num_seqs, max_blocks] int32, the blocks of the sequence in each row.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks: int) -> None:
        self.tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Sequences that may start now."""
        return len(self._free)

    def take(self, sequence: Sequence, blocks: list[int]) -> None:
        """Give a sequence a row and its blocks."""
        sequence.blocks = blocks
        sequence.slot = self._free.pop()
        self.tables[sequence.slot, : len(blocks)] = blocks

    def set(self, sequence: Sequence, index: int, block: int) -> None:
        """Block number `index` of a sequence, a new one at the end or another in its place."""
        sequence.blocks[index : index + 1] = [block]
        self.tables[sequence.slot, index] = block

    def give_back(self, sequence: Sequence) -> list[int]:
        """Take row and blocks away from a sequence; returns the blocks."""
        blocks, sequence.blocks = sequence.blocks, []
        self._free.append(sequence.slot)
        sequence.slot = -1
        return blocks
