"""Models with quantised weights: rollout equals training to the bit, and both are the dequantised model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import Kind, random_blocks, save_gguf
from quantised_checkpoints import save_fp8, save_mxfp4
from transformers import PreTrainedModel

from hetero.engine import Engine, SamplingParams
from hetero.errors import ModelError
from hetero.kernels import cpu
from hetero.models import base_hash, forward_hidden, load_model, scoring_batch
from hetero.models.config import HeteroConfig
from hetero.models.lora import LoraConfig, lora_parameters
from hetero.train import Trainer, TrainSample

CASES = [
    ("qwen3_moe", "int4", "int8"),
    ("qwen3_moe", "int4_asym", "fp8"),
    ("gpt_oss", "mxfp4", "bf16"),
    ("gpt_oss", "nf4", "int8_asym"),
]


def tokens(count: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("name", "experts", "dense"), CASES)
def test_rollout_logprobs_are_the_trainers(
    name: str, experts: str, dense: str, checkpoint: Callable[[str], Path]
) -> None:
    lora = LoraConfig(rank=4, alpha=16)
    model = load_model(checkpoint(name), device="cpu", experts=experts, dense=dense, lora=lora)
    assert (model.hetero.experts, model.hetero.dense) == (experts, dense)
    check(model)


def save_k_quants(name: str, directory: Path) -> tuple[Path, Path]:
    def quantise(values: np.ndarray, kind: Kind) -> np.ndarray:
        e, n, k = values.shape
        return random_blocks(kind.name.lower(), e, n, k // 256, size=1e-3)

    kinds = {"gate": Kind.Q4_K, "up": Kind.Q4_K, "down": Kind.Q6_K}
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    return save_gguf(name, directory, kinds, quantise=quantise, **sizes)


@pytest.mark.parametrize(
    ("save", "name", "format"),
    [
        (save_fp8, "qwen3_moe", "fp8"),
        (save_mxfp4, "gpt_oss", "mxfp4"),
        (save_gguf, "mixtral", "q4_0, q4_1"),
        (save_k_quants, "qwen3moe", "q4_k, q6_k"),
    ],
)
def test_rollout_logprobs_are_the_trainers_in_a_checkpoint_s_own_codes(
    save: Callable[..., tuple[Path, Path]], name: str, format: str, tmp_path: Path
) -> None:
    model = load_model(save(name, tmp_path)[0], device="cpu", lora=LoraConfig(rank=4, alpha=16))
    assert model.hetero.experts == format
    check(model)


def check(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.add_(0.05)
    before = base_hash(model)
    engine = Engine(model, max_num_seqs=3, prefill_chunk=16, kv_memory="8MiB")
    prompts = [tokens(n) for n in (3, 31, 40, 40)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    samples = [
        TrainSample(prompt, done.token_ids, logprobs=done.logprobs, advantage=1.0 - i, group=i)
        for i, (prompt, done) in enumerate(zip(prompts, engine.generate(prompts, params), strict=True))
    ]
    trainer = Trainer(model, lr=1e-2, micro_batch_tokens=100)
    metrics = trainer.forward_backward(samples)
    assert metrics["mismatch/logp_abs_max"] == 0
    assert metrics["mismatch/bitwise_equal_frac"] == 1
    assert trainer.optim_step()["optim/updates"] == 1
    assert base_hash(model) == before


@pytest.mark.parametrize(("name", "experts", "dense"), CASES)
def test_a_quantised_model_is_the_model_of_its_dequantised_weights(
    name: str, experts: str, dense: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    quantised = load_model(checkpoint(name), device="cpu", experts=experts, dense=dense)
    quantised.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = load_model(tmp_path, device="cpu")
    batch = scoring_batch([tokens(50)])
    with torch.no_grad():
        for isa in ("scalar", "amx_emulated"):  # they round weights; others sum codes (docs/formats.md)
            with cpu.using(cpu.Context(2, isa)):
                got, want = forward_hidden(quantised, batch), forward_hidden(plain, batch)
                assert torch.equal(got, want), isa
                original = forward_hidden(load_model(checkpoint(name), device="cpu"), batch)
                assert not torch.equal(got, original)


def test_formats_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ModelError, match="not a weight format"):
        HeteroConfig(experts="int3")
    with pytest.raises(ModelError, match="group_size=31"):
        HeteroConfig(experts="int4", group_size=31)
    with pytest.raises(ModelError, match="takes the codes of a GGUF file"):
        HeteroConfig(experts="q4_0")
