"""Tiny models to train: a dense one left to PyTorch (tight tolerances) and a Mixtral on the exact kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hetero.models.load import load_model
from hetero.models.lora import LoraConfig, lora_parameters
from hetero.train.batch import TrainSample

VOCAB = 64
Load = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def tiny_dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 2 layers, hidden 32, context of 96."""
    directory = tmp_path_factory.mktemp("tiny-dense")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def load_dense(tiny_dense_dir: Path) -> Load:
    """Loads the Llama in PyTorch with activations in `dtype`, its adapter away from zero."""

    def load(dtype: torch.dtype = torch.float64, **kwargs: Any) -> PreTrainedModel:
        lora = LoraConfig(rank=4, alpha=8.0, **kwargs)
        model = load_model(tiny_dense_dir, dense="torch", device="cpu", dtype=dtype, lora=lora)
        return stir(model)

    return load


@pytest.fixture
def load_moe(tiny_moe_dir: Path) -> Load:
    """Loads the tiny Mixtral on the CPU kernels, its adapter away from zero."""

    def load(**kwargs: Any) -> PreTrainedModel:
        return stir(load_model(tiny_moe_dir, device="cpu", lora=LoraConfig(rank=4, alpha=8.0, **kwargs)))

    return load


def stir(model: PreTrainedModel) -> PreTrainedModel:
    """Give the B factors values, so that every factor has a gradient and the adapter an effect."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def make_samples() -> Callable[..., list[TrainSample]]:
    """Factory of random samples; see `_make_samples` for its arguments."""
    return _make_samples


def _make_samples(
    seed: int = 0, num_groups: int = 3, size: int = 4, vocab: int = VOCAB, prompt_len: int = 12
) -> list[TrainSample]:
    """Groups with one template, completions that share beginnings, masks, plausible log-probabilities."""
    rng = random.Random(seed)
    template = rng.choices(range(vocab), k=5)
    samples = []
    for group in range(num_groups):
        prompt = template + rng.choices(range(vocab), k=rng.randint(1, prompt_len))
        for index in range(size):
            completion = [rng.choice((7, 8)), *rng.choices(range(vocab), k=rng.randint(0, 8))]
            mask = [rng.random() < 0.8 for _ in completion] if index == 1 else None
            samples.append(
                TrainSample(
                    prompt,
                    completion,
                    logprobs=[-4.0 + rng.gauss(0, 0.3) for _ in completion],
                    advantage=rng.gauss(0, 1),
                    mask=mask,
                    group=group,
                )
            )
    return samples
