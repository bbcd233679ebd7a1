"""Our side of the paired benchmark: the engine and the trainer on one model object."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from hetero.bench.model_work import ModelWork, counting
from hetero.bench.workload import Measurement, Workload, peak_rss_bytes
from hetero.engine import Engine, SamplingParams
from hetero.kernels import cpu
from hetero.models import load_model
from hetero.models.lora import LoraConfig
from hetero.train import Trainer, TrainSample


def measure(model_dir: str, workload: Workload, *, repeats: int, threads: int, format: str) -> Measurement:
    """Time one case on hetero, with `threads` threads in the kernel pool and experts in `format`."""
    torch.set_num_threads(1)  # its idle threads would take the cores from ours, as in a run
    with cpu.using(cpu.Context(threads=threads)):
        lora = LoraConfig(rank=workload.lora_rank) if workload.case == "step" else None
        model = load_model(model_dir, experts=format, device="cpu", lora=lora)
        run = {"decode": decode, "prefill": prefill, "step": train_step}[workload.case]
        seconds, work = run(model, workload, repeats)
    return Measurement(
        "hetero", workload.case, min(seconds), workload.num_tokens(), peak_rss_bytes(), asdict(work)
    )


def _engine(model: Any, workload: Workload) -> Engine:
    return Engine(model, max_num_seqs=workload.num_sequences, prefill_chunk=2048)


def prefill(model: Any, workload: Workload, repeats: int) -> tuple[list[float], ModelWork]:
    """Seconds to read every prompt and sample one token for each."""
    engine = _engine(model, workload)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = workload.prompts(model.config.vocab_size)
    with counting(model, backward=False, head_rows=workload.num_sequences) as work:
        engine.generate(prompts, params)
    seconds = []
    for _ in range(repeats):
        engine.reset_cache()
        start = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    return seconds, work


def decode(model: Any, workload: Workload, repeats: int) -> tuple[list[float], ModelWork]:
    """Seconds to sample `new_tokens` for every sequence, once the prompts are in the cache."""
    engine = _engine(model, workload)
    prompts = workload.prompts(model.config.vocab_size)
    engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    params = SamplingParams(max_tokens=workload.new_tokens, ignore_eos=True)
    sampled = workload.num_sequences * workload.new_tokens
    with counting(model, backward=False, head_rows=sampled) as work:
        engine.generate(prompts, params)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    return seconds, work


def train_step(model: Any, workload: Workload, repeats: int) -> tuple[list[float], ModelWork]:
    """Seconds of forward and backward over every sample, group prompts shared."""
    trainer = Trainer(model, loss="reinforce")  # needs no recorded log-probabilities; the work is the same
    vocab = model.config.vocab_size
    samples = [
        TrainSample(prompt, completion, advantage=(-1.0) ** i, group=i // workload.group_size)
        for i, (prompt, completion) in enumerate(
            zip(workload.prompts(vocab), workload.completions(vocab), strict=True)
        )
    ]
    trained = workload.num_sequences * workload.new_tokens
    with counting(model, backward=True, head_rows=trained) as work:
        trainer.score(samples)  # the same packs, each layer once: nothing is recomputed
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        trainer.forward_backward(samples)
        seconds.append(time.perf_counter() - start)
    return seconds, work
