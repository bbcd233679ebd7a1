"""Adapter versions that stay in memory: each goes on giving its own bits, alone or beside others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hetero.errors import ArgumentError, ModelError
from hetero.models import (
    LoraConfig,
    adapter_at,
    adapter_version,
    adapters_by_rows,
    bump_adapter_version,
    detach_lora,
    forward_hidden,
    head,
    keep_versions,
    load_model,
    lora_disabled,
    lora_parameters,
    resident_versions,
    retain_version,
    scoring_batch,
)
from hetero.models.versions import kept_tensors, resident_keys, restore_versions, version_key

TEXTS = [[3, 4, 5, 6], list(range(7, 50)), [9], [8, 8, 8]]


def load(directory: Path, *, dense: str = "bf16", layout: str = "shared_outer") -> PreTrainedModel:
    targets = ("attention", "experts", "lm_head")
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets, expert_layout=layout)
    return load_model(directory, device="cpu", dense=dense, lora=lora)


def update(model: PreTrainedModel, seed: int) -> None:
    """What an optimiser does: every factor changes, and the version before is kept."""
    retain_version(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(torch.randn(master.shape, generator=generator) * 0.1)
    bump_adapter_version(model)


@torch.no_grad()
def outputs(model: PreTrainedModel, texts: list[list[int]] = TEXTS) -> torch.Tensor:
    """Logits of every token of `texts`, packed on one axis."""
    return head(model).logits(forward_hidden(model, scoring_batch(texts)))


@pytest.fixture(params=[("bf16", "shared_outer"), ("bf16", "per_expert"), ("torch", "shared_outer")], ids=str)
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    dense, layout = request.param
    return load(checkpoint("mixtral"), dense=dense, layout=layout)


def test_rows_of_several_versions_have_the_bits_of_each_alone(model: PreTrainedModel) -> None:
    keep_versions(model, 3)
    alone = {}
    for seed in range(3):
        update(model, seed)
        alone[version_key(model)] = outputs(model)
    with lora_disabled(model):
        alone["base"] = outputs(model)
        assert version_key(model) == "base"
    assert resident_keys(model) == set(alone)
    assert resident_versions(model) == [1, 2, 3]
    keys = list(alone)
    for order in (keys, keys[::-1], [keys[2], keys[2], keys[0], keys[1]]):
        ends = torch.tensor([len(text) for text in TEXTS]).cumsum(0).tolist()
        with adapters_by_rows(model, [(key, len(text)) for key, text in zip(order, TEXTS, strict=False)]):
            mixed = outputs(model)
        for key, first, end in zip(order, [0, *ends], ends, strict=False):
            if model.hetero.dense == "torch":  # PyTorch's own linears promise no bits
                torch.testing.assert_close(mixed[first:end], alone[key][first:end], rtol=0.02, atol=0.02)
            else:
                assert torch.equal(mixed[first:end], alone[key][first:end]), key
    for number, key in zip(resident_versions(model), keys, strict=False):
        assert version_key(model, number) == key
        with adapter_at(model, number):
            assert torch.equal(outputs(model), alone[key])
        with adapters_by_rows(model, [(key, sum(map(len, TEXTS)))]):
            assert torch.equal(outputs(model), alone[key])
    assert torch.equal(outputs(model), alone[keys[2]]), "all as before"
    assert len({tuple(out.flatten().tolist()) for out in alone.values()}) == 4


def test_what_leaves_the_window_is_gone(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("mixtral"))
    keep_versions(model, 2)
    keys = [version_key(model)]
    for seed in range(3):
        update(model, seed)
        keys.append(version_key(model))
        assert resident_versions(model) == [seed, seed + 1]
        assert resident_keys(model) == {"base", *keys[-2:]}
    with pytest.raises(ModelError, match=r"version 1 of the adapter is not in memory; there are \[2, 3\]"):
        version_key(model, 1)
    with pytest.raises(ModelError, match="not in memory any more"), adapters_by_rows(model, [(keys[0], 3)]):
        pass
    keep_versions(model, 1)
    assert resident_versions(model) == [3]
    update(model, 9)
    assert resident_keys(model) == {"base", version_key(model)}, "with a window of one nothing is kept"
    with pytest.raises(ArgumentError, match="at least one"):
        keep_versions(model, 0)


def test_a_change_without_a_new_number_is_another_version(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("mixtral"))
    keep_versions(model, 3)
    before, key = outputs(model), version_key(model)
    retain_version(model)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(0.1)
    assert version_key(model) != key
    with adapters_by_rows(model, [(key, before.shape[0])]):
        assert torch.equal(outputs(model), before)
    assert not torch.equal(outputs(model), before)
    assert adapter_version(model) == 0
    detach_lora(model)
    assert resident_keys(model) == {"base"}


def test_kept_versions_survive_a_checkpoint_to_the_bit(model: PreTrainedModel) -> None:
    keep_versions(model, 3)
    want = {}
    for seed in range(3):
        want[adapter_version(model)] = outputs(model)
        update(model, seed)
    saved = {n: {k: t.clone() for k, t in tensors.items()} for n, tensors in kept_tensors(model).items()}
    assert list(saved) == [1, 2]
    keep_versions(model, 1)
    keep_versions(model, 3)
    restore_versions(model, saved)
    assert resident_versions(model) == [1, 2, 3]
    for number in (1, 2):
        with adapter_at(model, number):
            assert torch.equal(outputs(model), want[number])
    name = next(iter(saved[1]))
    saved[1][name] = saved[1][name][:-1]
    with pytest.raises(ModelError, match="a kept version has"):
        restore_versions(model, saved)


def test_no_gradient_goes_through_several_versions(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("mixtral"))
    keep_versions(model, 2)
    update(model, 0)
    keys = [version_key(model, n) for n in resident_versions(model)]
    with adapters_by_rows(model, [(key, 2) for key in keys]):
        hidden = forward_hidden(model, scoring_batch([[3, 4], [5, 6]]))
        assert not hidden.requires_grad
        with pytest.raises(ModelError, match="one adapter version at a time"):
            head(model).logprobs(hidden, torch.tensor([1, 2, 3, 4]), 1.0)
