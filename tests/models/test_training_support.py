"""Checkpointing per layer and the digest of the base weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hetero.errors import ModelError
from hetero.models import base_hash, forward_hidden, load_model, scoring_batch, set_checkpointing

Checkpoint = Callable[[str], Path]
SEQUENCES = [[5, 9, 100, 23, 77, 12], [4, 4, 88]]


def gradient(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and the gradient of their square with respect to the embeddings."""
    leaf: list[torch.Tensor] = []

    def catch(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        leaf.append(output.detach().requires_grad_())
        return leaf[0]

    handle = model.get_input_embeddings().register_forward_hook(catch)
    try:
        hidden = forward_hidden(model, scoring_batch(SEQUENCES))
    finally:
        handle.remove()
    hidden.float().square().sum().backward()
    assert leaf[0].grad is not None
    return hidden.detach(), leaf[0].grad


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_checkpointing_changes_memory_not_bits(checkpoint: Checkpoint, name: str) -> None:
    model = load_model(checkpoint(name), device="cpu")
    runs = [0]
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: runs.__setitem__(0, runs[0] + 1))
    want = gradient(model)
    assert runs[0] == 1
    set_checkpointing(model, True)
    set_checkpointing(model, True)
    got = gradient(model)
    assert runs[0] == 3
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        forward_hidden(model, scoring_batch(SEQUENCES))
    assert runs[0] == 4
    set_checkpointing(model, False)
    gradient(model)
    assert runs[0] == 5
    with pytest.raises(ModelError, match="no layers"):
        set_checkpointing(nn.Linear(2, 2), True)


def test_base_hash_sees_every_weight_and_no_adapter(checkpoint: Checkpoint) -> None:
    model, twin = (load_model(checkpoint("gpt_oss"), device="cpu") for _ in range(2))
    digest = base_hash(model)
    assert base_hash(twin) == digest
    layer = model.model.layers[1]
    layer.register_parameter("lora_a", nn.Parameter(torch.ones(2)))
    assert base_hash(model) == digest
    spots = [
        layer.mlp.experts.store.down.data,
        layer.mlp.experts.store.gate_up_bias,
        layer.self_attn.q_proj.packed.data,
        layer.self_attn.k_proj.bias.data,
        layer.self_attn.sinks.data,
        layer.mlp.router.weight.data,
        model.model.norm.weight.data,
        model.model.embed_tokens.weight.data,
    ]
    for spot in spots:
        first = spot.view(-1)[:1]
        kept = first.clone()
        first += 1
        assert base_hash(model) != digest
        first.copy_(kept)
    assert base_hash(model) == digest
