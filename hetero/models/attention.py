"""The attention implementations that Transformers knows as "hetero" (our kernels) and "hetero_torch"
(PyTorch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hetero.errors import ModelError
from hetero.kernels import ops
from hetero.models import torch_attention
from hetero.models.config import METHOD
from hetero.models.forward import ForwardBatch, packed
from hetero.models.padding import Padding, plan
from hetero.models.probe import AttentionCall, recorder

TORCH_METHOD = f"{METHOD}_torch"

HARMLESS = frozenset(
    """
    position_ids position_embeddings output_attentions output_hidden_states output_router_logits use_cache
    cache_position return_dict num_items_in_batch cache past_key_values is_causal labels logits_to_keep
    """.split()  # noqa: SIM905
)
"""Keyword arguments that attention may receive and does not need."""


def _attend(
    kernels: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    hetero_batch: ForwardBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, S, D], key [B, Hkv, L, D], value [B, Hkv, L, Dv] -> [B, S, Hq, Dv]."""
    _check(module, dropout, hetero_batch, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if hetero_batch is None:
        return _padded(kernels, query, key, value, plan(query, key, attention_mask, kwargs), options), None
    layer: int = module.layer_idx  # type: ignore[assignment]
    calls = recorder.get()
    if calls is not None:
        calls.append(
            AttentionCall(layer, query.shape[1], key.shape[1], query.shape[3], value.shape[3], sliding_window)
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if kernels is ops:
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    if hetero_batch.kv is None:
        out = kernels.attention(q, k, v, hetero_batch.attention, **options)
    else:
        out = kernels.paged_attention(q, k, v, hetero_batch.kv[layer], hetero_batch.attention, **options)
    return out[None].to(query.dtype), None


def _check(module: nn.Module, dropout: float, batch: ForwardBatch | None, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if batch is None and packed.get():
        raise ModelError(
            f"{name} does not pass keyword arguments to its attention function, so it cannot run packed"
        )
    if dropout:
        raise ModelError(
            f"{name} asks for attention dropout {dropout}; hetero has none: set attention_dropout to 0"
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(f"{name} attends in both directions; hetero computes causal attention only")
    unknown = [k for k, v in kwargs.items() if v is not None and k not in HARMLESS]
    if unknown:
        raise ModelError(f"{name} passes {', '.join(unknown)} to attention, which hetero does not understand")


def _padded(
    kernels: Any, query: Tensor, key: Tensor, value: Tensor, padding: Padding, options: dict[str, Any]
) -> Tensor:
    """Ordinary Transformers calls: the rows of a padded batch become segments; padding rows come back as
    zeros."""
    batch, heads, length, _ = query.shape
    q = query.transpose(1, 2).reshape(batch * length, heads, -1)
    k = key.transpose(1, 2).reshape(-1, key.shape[1], key.shape[3])
    v = value.transpose(1, 2).reshape(-1, value.shape[1], value.shape[3])
    if padding.q_rows is not None:
        q = q[padding.q_rows]
    num_rows = q.shape[0]
    if kernels is ops:
        # The kernels take as many queries as keys; rows past the last segment are ignored.
        q = functional.pad(q, (0, 0, 0, 0, 0, k.shape[0] - num_rows))
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    out = kernels.attention(q, k, v, padding.batch, **options)[:num_rows].to(query.dtype)
    if padding.q_rows is not None:
        out = out.new_zeros(batch * length, heads, out.shape[-1]).index_copy(0, padding.q_rows, out)
    return out.view(batch, length, heads, -1)


def hetero_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention through the CPU kernels. Arguments: see `_attend`."""
    return _attend(ops, module, *args, **kwargs)


def hetero_torch_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The same in PyTorch, on any device. Arguments: see `_attend`."""
    return _attend(torch_attention, module, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(METHOD, hetero_attention)
ALL_ATTENTION_FUNCTIONS.register(TORCH_METHOD, hetero_torch_attention)
