"""Dense linears in a format of fewer bits, all the way: what is packed, adapters, gradients, a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero import loop
from hetero.kernels import cpu
from hetero.models import forward_hidden, load_adapter, load_model, save_adapter, scoring_batch
from hetero.models.linear import HeteroLinear
from hetero.models.lora import LoraConfig, lora_disabled, lora_parameters
from hetero.recipe.recipe import Recipe
from hetero.run.plan import memory_plan
from hetero.train import Trainer, TrainSample

Checkpoint = Callable[[str], Path]
LORA = LoraConfig(rank=4, alpha=16)
IDS = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def hidden(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return forward_hidden(model, scoring_batch([IDS]))


def stirred(path: Path, dense: str = "int8", **options: Any) -> PreTrainedModel:
    model = load_model(path, device="cpu", dense=dense, lora=LORA, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("dense", ["int8", "int8_asym", "fp8"])
@pytest.mark.parametrize(("name", "tied"), [("qwen3_moe", False), ("deepseek_v3", False), ("llama", True)])
def test_every_linear_is_packed_but_a_tied_head(
    name: str, tied: bool, dense: str, checkpoint: Checkpoint
) -> None:
    model = load_model(checkpoint(name), device="cpu", dense=dense)
    head = model.get_output_embeddings()
    formats = {
        key: module.packed.packing.format.name
        for key, module in model.named_modules()
        if isinstance(module, HeteroLinear) and module.packed is not None and module is not head
    }
    assert len(formats) >= 4
    assert set(formats.values()) == {dense}
    assert head.packed.packing.format.name == ("bf16" if tied else dense)
    assert model.hetero.dense == dense


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_what_is_planned_is_what_is_packed(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    recipe = Recipe.from_dict(
        {
            "model": {"path": str(checkpoint(name)), "dense": "int8"},
            "lora": {"targets": ["attention"]},
            "data": {"train": "arithmetic"},
            "rl": {"rewards": ["last_number"]},
            "train": {"steps": 1},
        }
    )
    model = load_model(checkpoint(name), device="cpu", dense="int8")
    packed = sum(
        m.packed.nbytes for m in model.modules() if isinstance(m, HeteroLinear) and m.packed is not None
    )
    rest = sum(p.numel() * 2 for p in model.parameters())
    planned = memory_plan(recipe).parts["other weights"]
    assert abs(planned - packed - rest) < 0.03 * planned


def test_adapters_come_back_to_the_bit_and_off_is_the_base(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe")
    model = stirred(path, experts="int4")
    want = hidden(model)
    save_adapter(model, tmp_path / "adapter")
    again = load_model(path, device="cpu", dense="int8", experts="int4")
    base = hidden(again)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(hidden(again), want)
    assert not torch.equal(base, want)
    with lora_disabled(again):
        assert torch.equal(hidden(again), base)


def test_peft_computes_the_same_on_the_decoded_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = stirred(checkpoint("mixtral"))
    model.save_pretrained(tmp_path / "plain")
    save_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, experts_implementation="eager"
    )
    with pytest.warns(RuntimeWarning, match="pattern keys"):
        reference = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        got, want = model(ids, use_cache=False).logits.float(), reference(ids, use_cache=False).logits
        with reference.disable_adapter():
            without = reference(ids, use_cache=False).logits
    assert float((without - want).norm() / want.norm()) > 0.1
    assert float((got - want).norm() / want.norm()) < 0.03


def test_gradients_are_those_of_the_decoded_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantised = stirred(checkpoint("qwen3_moe"))
    quantised.save_pretrained(tmp_path)
    plain = stirred(tmp_path, "bf16")
    sample = TrainSample(IDS[:20], IDS[20:], logprobs=[-1.0] * 20, advantage=1.0, group=0)
    grads = []
    for model in (quantised, plain):
        with cpu.using(cpu.Context(2, "scalar")):  # rounds weights; others may choose other experts
            Trainer(model, lr=1e-2).forward_backward([sample])
        grads.append({name: p.grad for name, p in lora_parameters(model).items()})
    assert grads[0].keys() == grads[1].keys()
    for name, want in grads[1].items():
        got = grads[0][name]
        assert got is not None
        assert want is not None
        assert float((got - want).norm() / want.norm()) < 0.03, name
        assert float(want.norm()) > 0, name


def test_a_run_with_quantised_weights_is_exact_at_every_step(tiny_moe_dir: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def even(completion_ids, **columns):\n"
        "    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]\n"
    )
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"word {letter}"}) + "\n" for letter in "abcdef"))
    recipe = Recipe.from_dict(
        {
            "model": {
                "path": str(tiny_moe_dir),
                "device": "cpu",
                "threads": 1,
                "experts": "int4",
                "group_size": 64,
                "symmetric": False,
                "dense": "int8",
            },
            "lora": {"rank": 4},
            "engine": {"kv_memory": "8MiB"},
            "data": {"train": str(data)},
            "rl": {"rewards": [f"{rewards}:even"], "group_size": 4, "prompts_per_step": 2, "max_tokens": 8},
            "train": {"steps": 3, "lr": 0.01, "micro_batch_tokens": 96},
        }
    )
    loop.run(recipe, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["mismatch/logp_abs_max"] for step in steps] == [0.0] * 3
    assert any(step["grad_norm"] > 0 for step in steps[:2])  # the last steps ran under another adapter
