"""The trainer with the dense parts on a GPU and the experts in RAM."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.models.load import load_model
from hetero.models.lora import LoraConfig, lora_parameters
from hetero.train import Trainer, TrainSample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Make = Callable[..., list[TrainSample]]


def load(directory: Path, device: str) -> PreTrainedModel:
    """The same model and adapter, B away from zero, on either device."""
    model = load_model(directory, device=device, lora=LoraConfig(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return model


def norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def test_gradient_is_close_to_the_cpus(tiny_moe_dir: Path, make_samples: Make) -> None:
    samples = make_samples(vocab=250)
    found = []
    for device in ("cpu", "cuda"):
        trainer = Trainer(load(tiny_moe_dir, device), micro_batch_tokens=60)
        trainer.forward_backward(samples)
        found.append({name: gradient.cpu() for name, gradient in trainer.gradients().items()})
    cpu, cuda = found
    assert norm({name: cuda[name] - cpu[name] for name in cpu}) < 0.1 * norm(cpu)


def test_training_and_resuming(tiny_moe_dir: Path, make_samples: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "loss": "sft"}
    samples = make_samples(vocab=250)
    trainer = Trainer(load(tiny_moe_dir, "cuda"), **settings)
    losses = []
    for _ in range(10):
        losses.append(trainer.forward_backward(samples)["loss"])
        trainer.optim_step()
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "step-10")
    resumed = Trainer(load(tiny_moe_dir, "cuda"), **settings)
    resumed.load(tmp_path / "step-10")
    assert all(torch.equal(resumed.params[name], param) for name, param in trainer.params.items())
    states = zip(
        trainer.optimizer.state_dict().values(), resumed.optimizer.state_dict().values(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in states)
