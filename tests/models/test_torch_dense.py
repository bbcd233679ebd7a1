"""Dense parts left to PyTorch (`dense="torch"`, or a GPU): close to the exact model, paged or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paging import Pager
from torch import nn

from hetero.models import forward_hidden, head, load_model, scoring_batch, set_checkpointing
from hetero.models.experts import HeteroExperts
from hetero.models.lora import LoraConfig, lora_parameters

Checkpoint = Callable[[str], Path]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
NAMES = ["mixtral_window", "qwen2_moe", "gpt_oss", "deepseek_v3", "gemma2"]
SEQUENCES = [[5, 9, 100, 23, 77, 12, 8] * 6, [4, 4, 88], [17, 64] * 20]


def median_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Median over tokens of the distance relative to the size of the hidden states."""
    got, want = got.cpu().float(), want.cpu().float()
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_agree_with_the_exact_model(checkpoint: Checkpoint, name: str, device: str) -> None:
    exact = load_model(checkpoint(name), device="cpu")
    model = load_model(checkpoint(name), device=device, dense="torch")
    assert model.hetero.dense == "torch"
    assert any(type(m) is nn.Linear for m in model.modules())
    assert all(m.store is not None for m in model.modules() if isinstance(m, HeteroExperts))
    with torch.no_grad():
        want = forward_hidden(exact, scoring_batch(SEQUENCES))
        got = forward_hidden(model, scoring_batch(SEQUENCES, model.device))
    assert got.device.type == device
    assert median_error(got, want) < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_paged_cache_changes_little(checkpoint: Checkpoint, name: str, device: str) -> None:
    model = load_model(checkpoint(name), device=device, dense="torch")
    pager = Pager(model, 3, 2, reverse=True)
    got: list[list[torch.Tensor]] = [[], [], []]
    for start, stop in ((0, 3), (3, 34), (34, 35), (35, 42)):
        work = [(i, ids[start:stop]) for i, ids in enumerate(SEQUENCES) if ids[start:stop]]
        for (i, _), hidden in zip(work, pager.step(work), strict=True):
            got[i].append(hidden)
    with torch.no_grad():
        want = forward_hidden(model, scoring_batch(SEQUENCES, model.device))
    assert median_error(torch.cat([piece for pieces in got for piece in pieces]), want) < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_training_gradients_agree_with_the_exact_model(
    checkpoint: Checkpoint, name: str, device: str
) -> None:
    gradients = []
    for where, dense in (("cpu", "bf16"), (device, "torch")):
        model = load_model(checkpoint(name), device=where, dense=dense, lora=LoraConfig(rank=4))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, factor in lora_parameters(model).items():
                if key.endswith("_b"):
                    factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
        set_checkpointing(model, True)
        batch = scoring_batch(SEQUENCES[:2], model.device)
        logp, entropy = head(model).logprobs(forward_hidden(model, batch), batch.token_ids, 1.0)
        assert logp.device.type == where
        assert not entropy.requires_grad
        (-logp.mean()).backward()
        gradients.append({key: p.grad for key, p in lora_parameters(model).items()})
    assert all(g is not None for grads in gradients for g in grads.values())
    both = [torch.cat([g.cpu().flatten() for g in grads.values()]) for grads in gradients]
    assert float(torch.nn.functional.cosine_similarity(*both, dim=0)) > 0.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_only_the_experts_stay_in_ram(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("qwen2_moe"), device="cuda", lora=LoraConfig(rank=4))
    adapted = {id(p) for m in model.modules() if isinstance(m, HeteroExperts) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("cpu" if id(parameter) in adapted else "cuda"), name
    ids = torch.tensor([[5, 9, 2, 77]], device="cuda")
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 7)
