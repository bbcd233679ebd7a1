"""What the engine recorded while sampling is what the trainer computes for the same token, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES

from hetero.engine import Engine, SamplingParams
from hetero.kernels.cpu import Context, using
from hetero.models import load_model
from hetero.models.lora import LoraConfig, adapter_version, lora_parameters
from hetero.train import Trainer, TrainSample

GROUP = 4
LENGTHS = (3, 31, 40, 66)


def prompts() -> list[list[int]]:
    """Groups of equal prompts: shorter and longer than a KV block, all with one beginning."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 128, (max(LENGTHS),), generator=generator).tolist()
    return [[*tokens[: n - 1], n] for n in LENGTHS for _ in range(GROUP)]


def roll_out(engine: Engine, temperature: float, version: int, step: int) -> list[TrainSample]:
    asked = prompts()
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=step, ignore_eos=True)
    completions = engine.generate(asked, params)
    assert all(completion.adapter_version == version for completion in completions)
    return [
        TrainSample(
            prompt,
            completion.token_ids,
            logprobs=completion.logprobs,
            advantage=(-1.0) ** i * (1 + i % 3),
            group=i // GROUP,
            adapter_version=completion.adapter_version,
        )
        for i, (prompt, completion) in enumerate(zip(asked, completions, strict=True))
    ]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_rollout_logprobs_are_the_trainers(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Over updates, temperatures, engine and micro-batch sizes and thread counts."""
    model = load_model(checkpoint(name), device="cpu", lora=LoraConfig(rank=4, alpha=16))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    cases = [(1.0, 64, 512, 2048, 1), (0.7, 3, 16, 50, 2), (1.5, 7, 5, 300, 1)]
    for step, (temperature, max_num_seqs, prefill_chunk, rows, threads) in enumerate(cases):
        engine = Engine(model, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk, kv_memory="8MiB")
        trainer = Trainer(model, lr=1e-2, temperature=temperature, micro_batch_tokens=rows)
        samples = roll_out(engine, temperature, adapter_version(model), step)
        with using(Context(threads=threads)):
            metrics = trainer.forward_backward(samples)
        assert metrics["mismatch/logp_abs_max"] == 0
        assert metrics["mismatch/bitwise_equal_frac"] == 1
        assert trainer.optim_step()["optim/updates"] == 1
        # The canary: the engine samples under the new adapter, and what it recorded before no longer fits.
        engine.reset_cache()
        assert [s.logprobs for s in roll_out(engine, temperature, step + 1, step)] != [
            s.logprobs for s in samples
        ]
