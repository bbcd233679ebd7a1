"""KV specs come from what a model does; pools have the kernels' layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero.errors import CapacityError, ModelError
from hetero.models import KVPool, KVSpec, kv_spec, load_model

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("qwen3_moe", [KVSpec(2, 16, 16)] * 2),
        ("mixtral_window", [KVSpec(2, 16, 16, window=7)] * 2),
        ("gpt_oss", [KVSpec(2, 16, 16, window=8), KVSpec(2, 16, 16)]),
        ("deepseek_v3", [KVSpec(4, 24, 24)] * 2),
    ],
)
def test_specs(checkpoint: Checkpoint, name: str, want: list[KVSpec]) -> None:
    assert kv_spec(load_model(checkpoint(name), device="cpu")) == want


def test_pool_layout_and_blocks(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    pool = KVPool(model, 3)
    assert pool.num_blocks == 3
    for layer in pool.layers:
        assert layer.k.shape == (3, 2, 16, 32, 2)
        assert layer.v.shape == (3, 2, 1, 16, 32, 2)
        assert layer.k.dtype == layer.v.dtype == torch.bfloat16
        assert not layer.k.any()
    total = sum(layer.k.nbytes + layer.v.nbytes for layer in pool.layers)
    assert pool.bytes_per_block * 3 == total
    assert KVPool.block_bytes(model) == pool.bytes_per_block
    for number, layer in enumerate(pool.layers, 1):
        layer.k[0] = number
        layer.v[0] = -number
    pool.copy_block(0, 2)
    data = np.zeros(pool.bytes_per_block, np.uint8)
    pool.read_block(2, data)
    for layer in pool.layers:
        layer.k[2] = layer.v[2] = 7
    pool.write_block(1, data)
    for number, layer in enumerate(pool.layers, 1):
        for block in (0, 1):
            assert bool((layer.k[block] == number).all())
            assert bool((layer.v[block] == -number).all())
        assert bool((layer.k[2] == 7).all())
    with pytest.raises(CapacityError, match=r"GiB cannot be had on cpu; give less kv_memory"):
        KVPool(model, 1 << 40)
    with pytest.raises(CapacityError, match="at least one block"):
        KVPool(model, 0)


def test_layers_that_do_not_attend_are_named(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu")
    del model.__dict__["_hetero_calls"]
    model.model.layers[1].forward = lambda hidden_states, **kwargs: hidden_states
    with pytest.raises(ModelError, match=r"has 2 layers but its attention was called for layers \[0\]"):
        kv_spec(model)


def test_a_model_that_cannot_run_packed_says_why(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu")
    del model.__dict__["_hetero_calls"]
    model.model.layers[1].forward = lambda hidden_states, **kwargs: hidden_states.view(7, -1)
    with pytest.raises(ModelError, match=r"cannot run sequences packed on one axis: RuntimeError: shape"):
        kv_spec(model)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    with pytest.raises(ModelError, match=r"attends with 'sdpa', which knows no packed batches"):
        kv_spec(model)
