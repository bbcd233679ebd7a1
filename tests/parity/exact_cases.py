"""Random settings under which rollout and training must agree, and how far they do: see
test_exact_property.py."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hetero.engine import Completion, Engine, Generation, SamplingParams
from hetero.kernels.cpu import Context, using
from hetero.models import (
    KVPool,
    LoraConfig,
    adapter_at,
    adapter_version,
    bump_adapter_version,
    keep_versions,
    load_model,
    lora_disabled,
    lora_parameters,
    retain_version,
)
from hetero.train import Trainer, TrainSample

FAMILIES = ("Mixtral", "Qwen3Moe", "DeepseekV3")
LORA_TARGETS = (
    ("attention", "mlp", "experts"),
    ("experts",),
    ("experts", "lm_head"),
    ("attention",),
    (".*o_proj|.*down_proj",),
)
EXPERTS = ("bf16", "int8", "int4", "fp8", "mxfp4", "nf4")
DENSE = ("bf16", "int8")
CONTEXT = 256


@dataclass(frozen=True)
class Setting:
    """What may never change a bit: how the engine and the trainer cut the work."""

    max_num_seqs: int
    prefill_chunk: int
    num_blocks: int
    threads: int
    micro_batch_tokens: int
    checkpointing: str
    order: int


@dataclass(frozen=True)
class Case:
    """A model and how its weights are kept, an adapter, what is asked of it, and two ways of computing it."""

    family: str
    config: dict[str, Any]
    formats: dict[str, Any]
    lora: dict[str, Any]
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    settings: tuple[Setting, Setting]
    seed: int
    steps: list[int]
    """Engine steps between the updates of a rollout under several adapter versions; one update for each."""


def settings() -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        max_num_seqs=st.sampled_from([1, 2, 3, 7, 64]),
        prefill_chunk=st.sampled_from([1, 5, 13, 32, 33, 100, 512]),
        num_blocks=st.integers(5, 9) | st.just(64),
        threads=st.integers(1, 3),
        micro_batch_tokens=st.sampled_from([1, 37, 100, 4096]),
        checkpointing=st.sampled_from(["layer", "none"]),
        order=st.integers(0, 99),
    )


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A tiny architecture; sizes are as often odd as not."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(num_experts, 5)))
    config: dict[str, Any] = {
        "vocab_size": draw(st.integers(17, 150)),
        "hidden_size": draw(st.integers(3, 100)),
        "intermediate_size": draw(st.integers(1, 100)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 35)),
        "num_experts_per_tok": top_k,
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": CONTEXT,
        "initializer_range": draw(st.sampled_from([0.02, 0.1, 0.5])),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    deep = config["num_hidden_layers"] > 1  # some layer must have experts
    if family == "Mixtral":
        window = draw(st.none() | st.integers(1, 70))
        return {**config, "num_local_experts": num_experts, "sliding_window": window}
    if family == "Qwen3Moe":
        window = draw(st.none() | st.integers(1, 70))
        return {
            **config,
            "num_experts": num_experts,
            "moe_intermediate_size": draw(st.integers(1, 70)),
            "norm_topk_prob": draw(st.booleans()),
            "mlp_only_layers": [0] if deep and draw(st.booleans()) else [],
            "attention_bias": draw(st.booleans()),
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
    # Transformers scores a group by its best two experts, so a group has at least two.
    groups = draw(st.integers(1, 3))
    num_experts = groups * draw(st.integers(2, 4))
    topk_group = draw(st.integers(1, groups))
    return {
        **config,
        "num_key_value_heads": kv_heads * group,
        "n_routed_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": min(top_k, topk_group * num_experts // groups),
        "moe_intermediate_size": draw(st.integers(1, 70)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "n_group": groups,
        "topk_group": topk_group,
        "first_k_dense_replace": int(deep and draw(st.booleans())),
        "q_lora_rank": draw(st.none() | st.integers(1, 40)),
        "kv_lora_rank": draw(st.integers(1, 40)),
        "qk_rope_head_dim": (rope := 2 * draw(st.integers(1, 20))),
        "head_dim": rope,
        "qk_nope_head_dim": draw(st.integers(1, 40)),
        "v_head_dim": draw(st.integers(1, 40)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "norm_topk_prob": draw(st.booleans()),
    }


@st.composite
def formats(draw: st.DrawFn, experts: str | None) -> dict[str, Any]:
    """How the weights are kept: options of `load_model`; experts: their format, if it is not to be drawn."""
    experts = experts or draw(st.sampled_from(EXPERTS))
    chosen = {"experts": experts, "dense": draw(st.sampled_from(DENSE))}
    if experts in ("int8", "int4"):
        chosen["symmetric"] = draw(st.booleans())
    if experts in ("int8", "int4", "nf4"):
        chosen["group_size"] = draw(st.sampled_from([32, 64, 128]))
    if experts != "bf16":
        chosen["scale_search"] = draw(st.sampled_from(["max", "mse"]))
    return chosen


@st.composite
def prompts_of(draw: st.DrawFn, vocab: int) -> list[list[int]]:
    """Groups of equal prompts; all groups begin alike, some go on for more than a KV block."""
    rng = random.Random(draw(st.integers(0, 999)))
    beginning = [rng.randrange(vocab) for _ in range(draw(st.sampled_from([0, 3, 32, 40])))]
    prompts = []
    for _ in range(draw(st.integers(1, 3))):
        own = [rng.randrange(vocab) for _ in range(draw(st.integers(1, 70)))]
        prompts += [beginning + own] * draw(st.integers(1, 3))
    return prompts


@st.composite
def cases(draw: st.DrawFn, experts: str | None = None) -> Case:
    family = draw(st.sampled_from(FAMILIES))
    config = draw(configs(family))
    prompts = draw(prompts_of(config["vocab_size"]))
    temperature = draw(st.sampled_from([0.3, 0.7, 1.0, 1.7]))
    truncate = {"top_p": 0.9, "top_k": 20, "min_p": 0.01}
    sampling = [
        SamplingParams(
            temperature=temperature,
            max_tokens=draw(st.integers(1, 36)),
            ignore_eos=draw(st.booleans()),
            **(truncate if draw(st.integers(0, 3)) == 0 else {}),
        )
        for _ in prompts
    ]
    lora = {
        "rank": draw(st.integers(1, 9)),
        "alpha": draw(st.sampled_from([1.0, 16.0])),
        "targets": draw(st.sampled_from(LORA_TARGETS)),
        "expert_layout": draw(st.sampled_from(["shared_outer", "per_expert"])),
        "expert_rank": draw(st.none() | st.integers(1, 5)),
    }
    return Case(
        family,
        config,
        draw(formats(experts)),
        lora,
        prompts,
        sampling,
        (draw(settings()), draw(settings())),
        draw(st.integers(0, 9)),
        draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)),
    )


@contextmanager
def built(case: Case) -> Iterator[PreTrainedModel]:
    """The model of a case, in bf16 from a checkpoint, with an adapter that matters."""
    config = getattr(transformers, f"{case.family}Config")(**case.config)
    with tempfile.TemporaryDirectory() as directory, torch.random.fork_rng():
        torch.manual_seed(case.seed)
        plain: PreTrainedModel = getattr(transformers, f"{case.family}ForCausalLM")(config)
        with torch.no_grad():
            for name, tensor in plain.state_dict().items():
                if name.endswith("norm.weight"):
                    tensor.uniform_(0.5, 1.5)
                elif "bias" in name:
                    tensor.normal_(std=0.3)
        plain.to(torch.bfloat16).save_pretrained(Path(directory))
        lora = LoraConfig(**case.lora)
        model = load_model(directory, device="cpu", lora=lora, lora_seed=case.seed, **case.formats)
        stir(model, case.seed, 0.1)
        yield model


def stir(model: PreTrainedModel, seed: int, size: float) -> None:
    """Move every factor of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(size * torch.randn(master.shape, generator=generator))
    bump_adapter_version(model)


def engine_of(model: PreTrainedModel, setting: Setting) -> Engine:
    return Engine(
        model,
        max_num_seqs=setting.max_num_seqs,
        prefill_chunk=setting.prefill_chunk,
        kv_memory=setting.num_blocks * KVPool.block_bytes(model),
        seed=5,
    )


def trainer_of(model: PreTrainedModel, case: Case, setting: Setting) -> Trainer:
    return Trainer(
        model,
        lr=1e-2,
        temperature=case.sampling[0].temperature,
        micro_batch_tokens=setting.micro_batch_tokens,
        checkpointing="layer" if setting.checkpointing == "layer" else "none",
    )


def roll_out(
    engine: Engine,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    setting: Setting,
    version: int | None = None,
) -> list[Completion]:
    """Completions in the order of the prompts, asked for in another order, each from its own stream."""
    generation = begin(engine, prompts, sampling, setting, version)
    while not generation.done:
        engine.step()
    return in_order(generation.completions, setting)


def begin(
    engine: Engine,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    setting: Setting,
    version: int | None = None,
) -> Generation:
    order = shuffled(len(prompts), setting)
    return engine.begin(
        [prompts[i] for i in order],
        [sampling[i] for i in order],
        streams=[(i, i % 2) for i in order],
        version=version,
    )


def shuffled(count: int, setting: Setting) -> list[int]:
    order = list(range(count))
    random.Random(setting.order).shuffle(order)
    return order


def in_order(done: list[Completion], setting: Setting) -> list[Completion]:
    """What was asked for as `shuffled`, in the order of the prompts."""
    pairs = zip(shuffled(len(done), setting), done, strict=True)
    return [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]


def samples_of(prompts: list[list[int]], completions: list[Completion]) -> list[TrainSample]:
    """What the trainer gets; raw log-probabilities, so that truncated sampling can be compared too."""
    groups = {tuple(prompt): number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    return [
        TrainSample(
            prompt,
            completion.token_ids,
            logprobs=completion.raw_logprobs,
            advantage=(-1.0) ** i * (1 + i % 3),
            group=groups[tuple(prompt)],
            adapter_version=completion.adapter_version,
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def gap(samples: list[TrainSample], scores: list[list[float]]) -> float:
    """Largest difference of a recorded log-probability and the trainer's; infinite where one is NaN."""
    largest = 0.0
    for sample, score in zip(samples, scores, strict=True):
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(score) > 0
        for recorded, computed in zip(sample.logprobs, score, strict=True):
            difference = abs(recorded - computed)
            largest = max(largest, difference if difference == difference else float("inf"))
    return largest


def facts(completions: list[Completion]) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.logprobs, c.raw_logprobs, c.finish_reason) for c in completions]


def differences(model: PreTrainedModel, case: Case, isa: str) -> Iterator[tuple[str, float]]:
    """(what was compared, max |delta log p|, infinite where tokens differ): every one must be 0.

    Each setting rolls out, trains on it, and steps; then the conversations go on under the new adapter.
    """
    one, two = case.settings
    prompts, sampling = case.prompts, case.sampling
    with using(Context(threads=one.threads, isa=isa)) as first, engine_of(model, one) as engine:
        rolled = roll_out(engine, prompts, sampling, one)
        samples = samples_of(prompts, rolled)
        with using(Context(threads=two.threads, isa=isa)) as second, engine_of(model, two) as other:
            yield "tokens of two settings", tokens_gap(rolled, roll_out(other, prompts, sampling, two))
            yield "rollout and scoring", gap(samples, trainer_of(model, case, two).score(samples))
            trainer = trainer_of(model, case, one)
            metrics = trainer.forward_backward(samples)
            yield "rollout and training", metrics["mismatch/logp_abs_max"]
            trainer.optim_step()
            stir(model, case.seed + 1, 0.02)
            longer = [prompt + c.token_ids + [3] for prompt, c in zip(prompts, rolled, strict=True)]
            again = roll_out(other, longer, sampling, two)
        with using(first):
            yield "tokens after an update", tokens_gap(again, roll_out(engine, longer, sampling, one))
            samples = samples_of(longer, again)
            yield "rollout and scoring after an update", gap(samples, trainer.score(samples))
            with lora_disabled(model):
                base = samples_of(longer, roll_out(engine, longer, sampling, one))
        with using(second):
            reference = trainer_of(model, case, two).score(base, reference=True)
            yield "rollout of the base model and reference", gap(base, reference)
        with using(first):
            yield from versions_side_by_side(model, case, engine, second)


def versions_side_by_side(
    model: PreTrainedModel, case: Case, engine: Engine, other: Context
) -> Iterator[tuple[str, float]]:
    """Rollouts begun under one version after the other, and under the base model, and finished together.

    Each must be what its version samples alone, and what is scored under it while others are in memory.
    """
    one, two = case.settings
    keep_versions(model, len(case.steps) + 1)
    begun = []
    for number, steps in enumerate([0, *case.steps]):
        if number:
            retain_version(model)
            stir(model, case.seed + 7 * number, 0.05)
        begun.append((adapter_version(model), begin(engine, case.prompts, case.sampling, one)))
        for _ in range(steps):
            engine.step()
    with lora_disabled(model):
        base = begin(engine, case.prompts, case.sampling, one)
    while engine.step():
        pass
    with using(other), engine_of(model, two) as single:
        trainer = trainer_of(model, case, two)
        for version, generation in begun:
            done = in_order(generation.completions, one)
            alone = roll_out(single, case.prompts, case.sampling, two, version=version)
            yield f"tokens of version {version} and of it alone", tokens_gap(done, alone)
            samples = samples_of(case.prompts, done)
            with adapter_at(model, version):
                scores = trainer.score(samples)
            yield "rollout beside other versions and scoring", gap(samples, scores)
            metrics = trainer.forward_backward(samples)
            yield "rollout and what the trainer finds of an older version", metrics["mismatch/logp_abs_max"]
            trainer.zero_grad()
        samples = samples_of(case.prompts, in_order(base.completions, one))
        scores = trainer.score(samples, reference=True)
        yield "rollout of the base model beside versions and reference", gap(samples, scores)
    keep_versions(model, 1)


def tokens_gap(one: list[Completion], two: list[Completion]) -> float:
    """0 when two rollouts are the same to the bit, else the largest difference of their log-probabilities."""
    if [c.token_ids for c in one] != [c.token_ids for c in two]:
        return float("inf")
    if facts(one) == facts(two):
        return 0.0
    pairs = [
        pair
        for a, b in zip(one, two, strict=True)
        for pair in zip(a.raw_logprobs, b.raw_logprobs, strict=True)
    ]
    return max((abs(a - b) for a, b in pairs), default=0.0) or float("inf")
