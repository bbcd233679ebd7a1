"""A step's tokens as the packed tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from hetero.engine.sequence import Sequence
from hetero.kernels.batch import KV_BLOCK, AttentionBatch


@dataclass(slots=True)
class Chunk:
    """Tokens [start, end) of a sequence; `last` when there are no more, so that the next can be drawn."""

    sequence: Sequence
    start: int
    end: int
    last: bool


@dataclass(slots=True)
class Step:
    """One forward pass: the newest token of each sequence in `decodes`, then the chunks."""

    decodes: list[Sequence]
    chunks: list[Chunk]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def group(self) -> list[tuple[str, int]]:
        """Put what runs with the same weights side by side; returns (name of the weights, number of rows)."""
        self.decodes.sort(key=lambda sequence: sequence.prompt.namespace.name)
        self.chunks.sort(key=lambda chunk: chunk.sequence.prompt.namespace.name)
        rows = [(sequence, 1) for sequence in self.decodes]
        rows += [(chunk.sequence, chunk.end - chunk.start) for chunk in self.chunks]
        return runs_of((sequence.prompt.namespace.name, count) for sequence, count in rows)


def runs_of(rows: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """(name, number of rows) with neighbours of one name put together."""
    return [(name, sum(count for _, count in run)) for name, run in groupby(rows, key=itemgetter(0))]


class BatchBuilder:
    """Packs steps; its arrays are made once, so what it returns is valid until the next call.

    Args:
        max_num_seqs: most segments of a step.
        prefill_chunk: most prompt tokens of a step.
    """

    def __init__(self, *, max_num_seqs: int, prefill_chunk: int) -> None:
        max_tokens = max_num_seqs + prefill_chunk
        self._token_ids = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int64)
        self._slots = np.zeros(max_tokens, np.int64)
        self._q_start = np.zeros(max_num_seqs + 1, np.int32)
        self._kv_len = np.zeros(max_num_seqs, np.int32)

    def build(
        self, step: Step, tables: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """(token ids [T] int64, positions [T] int64, attention) of a step, given every slot's block table."""
        num_decodes, num_segments = len(step.decodes), len(step.decodes) + len(step.chunks)
        self._token_ids[:num_decodes] = [sequence.token_ids[-1] for sequence in step.decodes]
        self._kv_len[:num_decodes] = [sequence.num_computed for sequence in step.decodes]
        self._positions[:num_decodes] = self._kv_len[:num_decodes] - 1
        self._q_start[: num_decodes + 1] = np.arange(num_decodes + 1)
        row = num_decodes
        for i, chunk in enumerate(step.chunks, num_decodes):
            end = row + chunk.end - chunk.start
            self._token_ids[row:end] = chunk.sequence.token_ids[chunk.start : chunk.end]
            self._positions[row:end] = np.arange(chunk.start, chunk.end)
            self._kv_len[i] = chunk.end
            self._q_start[i + 1] = row = end
        q_start, kv_len = self._q_start[: num_segments + 1], self._kv_len[:num_segments]
        slots = [s.slot for s in step.decodes] + [c.sequence.slot for c in step.chunks]
        block_tables = tables[slots, : -(-int(kv_len.max()) // KV_BLOCK)]
        positions = self._positions[:row]
        segments = np.repeat(np.arange(num_segments), np.diff(q_start))
        self._slots[:row] = (
            block_tables[segments, positions // KV_BLOCK] * np.int64(KV_BLOCK) + positions % KV_BLOCK
        )
        attention = AttentionBatch(
            q_start=torch.from_numpy(q_start),
            kv_len=torch.from_numpy(kv_len),
            block_tables=torch.from_numpy(np.ascontiguousarray(block_tables)),
            slots=torch.from_numpy(self._slots[:row]),
        )
        return torch.from_numpy(self._token_ids[:row]), torch.from_numpy(positions), attention
