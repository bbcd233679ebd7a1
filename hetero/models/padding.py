"""Ordinary Transformers calls, padded and cached, told as segments for the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, find_packed_sequence_indices

from hetero.errors import ModelError
from hetero.kernels.batch import AttentionBatch
from hetero.models.config import METHOD


@dataclass(frozen=True, slots=True)
class Padding:
    """Which rows of a [B * S] query axis are real (None: all of them), and their segments."""

    q_rows: Tensor | None
    batch: AttentionBatch


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask that reaches `hetero` attention: [B, L] bool of real positions, or None when all are.

    The causal and sliding-window parts are computed by the kernels. Raises ModelError for any other pattern.
    """
    if use_vmap or allow_is_bidirectional_skip is not None:
        raise ModelError(
            "this model masks attention by more than causality, a window and padding; hetero cannot"
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    if mask.shape[1] != kv_length:
        raise ModelError(
            f"the attention mask covers {mask.shape[1]} of {kv_length} cached positions; use a DynamicCache"
        )
    return None if bool(mask.all()) else mask


for _method in (METHOD, f"{METHOD}_torch"):
    ALL_MASK_ATTENTION_FUNCTIONS.register(_method, padding_mask)


def plan(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Padding:
    """Segments of query [B, Hq, S, D] over key [B, Hkv, L, D], whose S queries are the last of L positions.

    Without a mask and a cache, position ids that restart (Transformers' packed format) cut rows into
    sequences.
    """
    b, s, total = query.shape[0], query.shape[2], key.shape[2]
    if mask is not None and mask.ndim != 2:
        raise ModelError(
            f"hetero attention takes a padding mask [B, L], got a mask of shape {tuple(mask.shape)}"
        )
    if mask is None:
        position_ids = kwargs.get("position_ids")
        cuts = None
        if s == total and isinstance(position_ids, Tensor) and position_ids.shape == (b, s):
            cuts = find_packed_sequence_indices(position_ids)
        if cuts is not None:
            lengths = [n for row in cuts.tolist() for n in _runs(row)]
            return Padding(None, AttentionBatch.packed(lengths))
        return Padding(None, _segments([s] * b, [total] * b, torch.arange(b * total)))
    real = mask.to("cpu", torch.bool)
    queries = real[:, total - s :]
    keep = queries.any(1)
    q_rows = queries.flatten().nonzero()[:, 0].to(query.device)
    seen = (real & keep[:, None]).flatten().nonzero()[:, 0]
    q_lengths, kv_lengths = queries.sum(1)[keep].tolist(), real.sum(1)[keep].tolist()
    return Padding(q_rows, _segments(q_lengths, kv_lengths, seen))


def _runs(row: list[int]) -> list[int]:
    """Lengths of the runs of equal numbers."""
    edges = [0] + [i for i in range(1, len(row)) if row[i] != row[i - 1]] + [len(row)]
    return [b - a for a, b in pairwise(edges)]


def _segments(q_lengths: list[int], kv_lengths: list[int], kv_rows: Tensor) -> AttentionBatch:
    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    return AttentionBatch(
        q_start=starts(q_lengths),
        kv_len=torch.tensor(kv_lengths, dtype=torch.int32),
        kv_rows=kv_rows.to(torch.int32),
        kv_start=starts(kv_lengths),
    )
