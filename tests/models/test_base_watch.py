"""One changed bit of the base weights is found within a round, and the adapter's are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hetero.models import LoraConfig, load_model, lora_parameters
from hetero.models.base_watch import CHECKS_PER_ROUND, BaseWatch
from hetero.models.experts import HeteroExperts


@pytest.fixture
def model(checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return load_model(checkpoint("mixtral"), device="cpu", lora=LoraConfig(rank=2))


def rounds(watch: BaseWatch) -> list[bool]:
    return [watch.check() for _ in range(CHECKS_PER_ROUND)]


def test_what_stays_is_fine(model: PreTrainedModel) -> None:
    watch = BaseWatch(model)
    assert all(rounds(watch))
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(1.0)
    assert all(rounds(watch))


@pytest.mark.parametrize("place", ["experts", "embedding"])
def test_a_changed_bit_is_found_within_a_round_and_not_forgotten(place: str, model: PreTrainedModel) -> None:
    watch = BaseWatch(model)
    rounds(watch)
    if place == "experts":
        store = next(m.store for m in model.modules() if isinstance(m, HeteroExperts))
        assert store is not None
        weights = store.down.data
    else:
        weights = model.get_input_embeddings().weight.data
    weights.reshape(-1).view(torch.uint8)[-1:] ^= 1
    assert not all(rounds(watch))
    weights.reshape(-1).view(torch.uint8)[-1:] ^= 1
    assert not any(rounds(watch)), "what was seen stays said"
