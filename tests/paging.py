"""Runs sequences through a paged KV pool the way an engine does, chunk by chunk, in any interleaving."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.kernels.batch import KV_BLOCK, AttentionBatch
from hetero.models import ForwardBatch, KVPool, forward_hidden


class Pager:
    """Gives every sequence its blocks and forwards any mix of chunks of them.

    Args:
        capacity: blocks per sequence.
        reverse: hand blocks out from the end of the pool, so that tables are not in memory order.
    """

    def __init__(
        self, model: PreTrainedModel, num_sequences: int, capacity: int, reverse: bool = False
    ) -> None:
        self.model = model
        self.pool = KVPool(model, num_sequences * capacity)
        ids = torch.arange(num_sequences * capacity, dtype=torch.int32)
        self.tables = (ids.flip(0) if reverse else ids).view(num_sequences, capacity)
        self.lengths = [0] * num_sequences

    @torch.no_grad()
    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Append token ids to sequences, [(sequence, ids), ...], in one forward; hidden states of each."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, ids in work:
            start = self.lengths[sequence]
            self.lengths[sequence] += len(ids)
            token_ids += ids
            positions += range(start, start + len(ids))
            table = self.tables[sequence].tolist()
            slots += [table[p // KV_BLOCK] * KV_BLOCK + p % KV_BLOCK for p in range(start, start + len(ids))]
        q_lengths = [len(ids) for _, ids in work]
        batch = AttentionBatch(
            q_start=torch.tensor([0, *q_lengths]).cumsum(0).to(torch.int32),
            kv_len=torch.tensor([self.lengths[s] for s, _ in work], dtype=torch.int32),
            block_tables=self.tables[[s for s, _ in work]],
            slots=torch.tensor(slots),
        )
        hidden = forward_hidden(
            self.model,
            ForwardBatch(
                torch.tensor(token_ids, device=self.model.device),
                torch.tensor(positions, device=self.model.device),
                batch,
                self.pool.layers,
            ),
        )
        return list(hidden.split(q_lengths))
