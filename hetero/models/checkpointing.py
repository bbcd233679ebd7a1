"""Activation checkpointing per decoder layer: keep a layer's input, compute the rest again in the
backward."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hetero.errors import ModelError


def set_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Switch per-layer checkpointing on or off.

    Unlike Transformers' own switch it works in eval mode, where nothing is random, so that a recomputed
    layer has the bits of the first forward. It costs nothing when no gradient is wanted. Raises ModelError
    for a model without layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no layers that can be checkpointed")
    for layer in layers:
        plain = layer.__dict__.get("_hetero_forward")
        if enabled and plain is None:
            layer.__dict__["_hetero_forward"] = layer.forward
            layer.forward = _checkpointed(layer.forward)
        elif not enabled and plain is not None:
            layer.forward = layer.__dict__.pop("_hetero_forward")


def _checkpointed(forward: Any) -> Any:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)

    return run
