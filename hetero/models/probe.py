"""Runs a few tokens through a model once, to learn what its code does instead of guessing from its config."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetero.errors import HeteroError, ModelError
from hetero.kernels.batch import AttentionBatch
from hetero.models.forward import ForwardBatch, forward_hidden

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How one attention layer called the attention function."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None


recorder: ContextVar[list[AttentionCall] | None] = ContextVar("hetero_recorder", default=None)
"""Where the attention function notes its calls while a probe runs."""


def scoring_batch(sequences: list[list[int]], device: torch.device | str = "cpu") -> ForwardBatch:
    """Independent sequences of token ids as one packed batch without a KV pool."""
    lengths = [len(ids) for ids in sequences]
    attention = AttentionBatch.packed(lengths)
    return ForwardBatch(
        token_ids=torch.tensor([t for ids in sequences for t in ids], dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(n) for n in lengths]).to(device),
        attention=attention,
    )


def probe_batch(model: PreTrainedModel) -> ForwardBatch:
    """Two short sequences of arbitrary tokens."""
    vocab = int(model.config.get_text_config(decoder=True).vocab_size)
    return scoring_batch([[1 % vocab, 2 % vocab, 3 % vocab], [4 % vocab, 5 % vocab]], model.device)


@torch.no_grad()
def probe_hidden(model: PreTrainedModel) -> Tensor:
    """Hidden states of the probe batch."""
    return forward_hidden(model, probe_batch(model))


def attention_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """One entry per attention layer, in layer order; found once and kept on the model.

    Raises: ModelError when a layer does not attend through the attention interface.
    """
    cached: list[AttentionCall] | None = model.__dict__.get("_hetero_calls")
    if cached is not None:
        return cached
    calls: list[AttentionCall] = []
    token = recorder.set(calls)
    try:
        probe_hidden(model)
    except HeteroError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot run sequences packed on one axis: {type(error).__name__}: {error}"
        ) from error
    finally:
        recorder.reset(token)
    layers = sorted(call.layer for call in calls)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if layers != list(range(expected)):
        raise ModelError(
            f"{type(model).__name__} has {expected} layers but its attention was called for layers "
            f"{layers}. hetero runs "
            "models whose every layer attends through Transformers' attention interface (no state-space, "
            "linear or "
            "shared-KV layers); load it with attn_implementation='hetero' or hetero.load_model()"
        )
    model.__dict__["_hetero_calls"] = sorted(calls, key=lambda call: call.layer)
    return model.__dict__["_hetero_calls"]
