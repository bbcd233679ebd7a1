"""LoRA gradients against autograd in fp64 on Transformers' own eager modules.

A layer's experts must agree within 1 %. Through a whole model the bf16 residual stream adds its own rounding
(plain PyTorch in bf16 is off by as much), so there the bound is 4 %, on a sequence that both route alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero.models import forward_hidden, head, load_model, scoring_batch, set_checkpointing
from hetero.models.experts import HeteroExperts, experts_modules
from hetero.models.lora import LoraConfig, lora_parameters

Checkpoint = Callable[[str], Path]
LENGTH = 24


def adapted(path: Path, layout: str) -> PreTrainedModel:
    """A model whose adapter is no longer zero."""
    model = load_model(path, device="cpu", lora=LoraConfig(rank=4, alpha=8, expert_layout=layout))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, factor in lora_parameters(model).items():
            if name.endswith("_b"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    return model


def in_fp64(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def leaves_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """fp64 copies of the factors as the kernels see them."""
    parameters = lora_parameters(model).items()
    return {name: p.detach().bfloat16().double().requires_grad_() for name, p in parameters}


def merged(reference: PreTrainedModel, factors: dict[str, Tensor], scale: float = 2.0) -> dict[str, Tensor]:
    """The reference's parameters with the adapter added, as functions of the factors."""
    weights = dict(reference.named_parameters())
    for name in {key.rpartition(".lora_")[0] for key in factors}:
        part = {k.rpartition(".lora_")[2]: v for k, v in factors.items() if k.startswith(f"{name}.lora_")}
        if "a" in part:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * part["b"] @ part["a"]
            continue
        gate, up, down = (scale * part[f"{p}_b"] @ part[f"{p}_a"] for p in ("gate", "up", "down"))
        both = torch.cat([gate, up], dim=1)
        module: Any = reference.get_submodule(name)
        if not module.is_concatenated:
            both = both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if module.is_transposed:
            both, down = both.mT, down.mT
        weights[f"{name}.gate_up_proj"] = weights[f"{name}.gate_up_proj"] + both
        weights[f"{name}.down_proj"] = weights[f"{name}.down_proj"] + down
    return weights


def distance(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_gradients_of_one_layers_experts(checkpoint: Checkpoint, name: str, layout: str) -> None:
    model, reference = adapted(checkpoint(name), layout), in_fp64(checkpoint(name))
    where, theirs = list(experts_modules(reference))[-1]
    ours = model.get_submodule(where)
    generator = torch.Generator().manual_seed(3)
    e, h = ours.num_experts, ours.layout.hidden_size
    x = torch.randn(50, h, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(e, generator=generator)[:2] for _ in range(50)])
    mix = torch.rand(50, 2, generator=generator)
    dout = torch.randn(50, h, generator=generator).bfloat16()
    mine = (x.clone().requires_grad_(), mix.clone().requires_grad_())
    ours(mine[0], ids, mine[1]).backward(dout)
    twin = (x.double().requires_grad_(), mix.double().requires_grad_())
    leaves = {k: v for k, v in leaves_of(model).items() if k.startswith(f"{where}.lora_")}
    weights = {
        key.removeprefix(f"{where}."): value
        for key, value in merged(reference, leaves).items()
        if key.startswith(f"{where}.")
    }
    functional_call(theirs, weights, (twin[0], ids, twin[1])).backward(dout.double())
    parameters = lora_parameters(model)
    assert len(leaves) == 6
    for key, leaf in leaves.items():
        assert distance(parameters[key].grad, leaf.grad) < 0.01, key
    assert distance(mine[0].grad, twin[0].grad) < 0.01
    assert distance(mine[1].grad, twin[1].grad) < 0.01


def routed_alike(model: PreTrainedModel, reference: PreTrainedModel, weights: dict[str, Tensor]) -> list[int]:
    """A sequence for which both choose the same experts everywhere."""
    seen: list[Tensor] = []
    kinds = [m for m in model.modules() if isinstance(m, HeteroExperts)]
    kinds += [m for _, m in experts_modules(reference)]
    hooks = [
        m.register_forward_pre_hook(lambda module, args: seen.append(args[1].sort(-1).values)) for m in kinds
    ]
    generator = torch.Generator().manual_seed(5)
    try:
        for _ in range(60):
            ids = torch.randint(3, 128, (LENGTH,), generator=generator)
            seen.clear()
            with torch.no_grad():
                forward_hidden(model, scoring_batch([ids.tolist()]))
                functional_call(reference, weights, (ids[None],))
            half = len(seen) // 2
            if all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True)):
                return ids.tolist()
    finally:
        for hook in hooks:
            hook.remove()
    raise AssertionError("no sequence is routed alike")


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "llama"])
def test_gradients_through_the_whole_model(checkpoint: Checkpoint, name: str, layout: str) -> None:
    model, reference = adapted(checkpoint(name), layout), in_fp64(checkpoint(name))
    leaves = leaves_of(model)
    weights = merged(reference, leaves)
    ids = routed_alike(model, reference, weights)
    targets = torch.tensor([*ids[1:], 3])
    set_checkpointing(model, True)
    logp, _ = head(model).logprobs(forward_hidden(model, scoring_batch([ids])), targets, 1.0)
    (-logp.mean()).backward()
    logits = functional_call(reference, weights, (torch.tensor([ids]),)).logits[0]
    (-torch.log_softmax(logits, -1).gather(1, targets[:, None]).mean()).backward()
    parameters = lora_parameters(model)
    errors = {key: distance(parameters[key].grad, leaf.grad) for key, leaf in leaves.items()}
    assert sorted(errors.values())[len(errors) // 2] < 0.025
    assert max(errors.values()) < 0.04, max(errors, key=lambda key: errors[key])
