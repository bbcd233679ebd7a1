"""One forward of a model over a packed batch: what the engine and the trainer both call."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetero.errors import ModelError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from hetero.kernels.batch import AttentionBatch, KVLayer

packed: ContextVar[bool] = ContextVar("hetero_packed", default=False)
"""True while `forward_hidden` runs, so that attention can tell a lost `hetero_batch` from an ordinary
call."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything that one forward needs, for rollouts and for training alike.

    Attributes:
        token_ids: [T] int64, the tokens of all segments, packed on one axis without padding.
        positions: [T] int64, position of each token in its own sequence.
        attention: which rows each token may look at (see `AttentionBatch`).
        kv: one paged layer per attention layer (the engine), or None: keys and values come from this batch
            alone (training and scoring), and the forward is differentiable.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    kv: list[KVLayer] | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def forward_hidden(model: PreTrainedModel, batch: ForwardBatch) -> Tensor:
    """Run the decoder of `model` on a packed batch.

    Returns: [T, H] in the model's dtype, after the final norm.
    Raises: ShapeError for tensors that are not [T] int64; ModelError when the model cannot run packed.
    """
    for name, value in (("token_ids", batch.token_ids), ("positions", batch.positions)):
        if value.dtype != torch.int64 or value.ndim != 1 or value.shape[0] != batch.num_tokens:
            raise ShapeError(f"{name} must be an int64 tensor [T], got {value.dtype} {tuple(value.shape)}")
    decoder = model.get_decoder()
    if not str(decoder.config._attn_implementation).startswith("hetero"):
        raise ModelError(
            f"{type(model).__name__} attends with {decoder.config._attn_implementation!r}, which knows no "
            "packed batches; load it with hetero.load_model() or attn_implementation='hetero'"
        )
    device = batch.token_ids.device
    token = packed.set(True)
    try:
        output = decoder(
            input_ids=batch.token_ids[None],
            # Transformers hands a 4-D mask through untouched: no mask is built, and ours is ignored.
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
            position_ids=batch.positions[None],
            use_cache=False,
            hetero_batch=batch,
        )
    finally:
        packed.reset(token)
    hidden = output.last_hidden_state
    if hidden.shape[:2] != (1, batch.num_tokens):
        raise ModelError(
            f"{type(decoder).__name__} returned hidden states {tuple(hidden.shape)} for {batch.num_tokens} "
            "packed "
            "tokens; it reorders or drops tokens, which hetero cannot follow"
        )
    return hidden[0]
