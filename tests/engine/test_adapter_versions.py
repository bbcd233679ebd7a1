"""Several adapter versions in flight: every sequence ends as it would have ended alone under its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_runner import MockRunner
from transformers import PreTrainedModel

from hetero.engine import Completion, Engine, Generation, SamplingParams
from hetero.errors import ModelError
from hetero.kernels.batch import KV_BLOCK
from hetero.models import (
    KVPool,
    LoraConfig,
    adapter_at,
    adapter_version,
    bump_adapter_version,
    forward_hidden,
    head,
    keep_versions,
    load_model,
    lora_disabled,
    lora_parameters,
    retain_version,
    scoring_batch,
)


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i * i + i) % 50 for i in range(n)]


batches = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1, 5, 32, 33, 70]), min_size=1, max_size=4),  # prompt tokens
        st.integers(1, 40),  # max_tokens
        st.booleans(),  # under the base model
        st.integers(0, 30),  # engine steps before the adapter changes
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=batches,
    max_num_seqs=st.sampled_from([1, 2, 3, 16]),
    prefill_chunk=st.sampled_from([1, 7, 32, 512]),
    num_blocks=st.sampled_from([5, 9, 200]),
)
def test_sequences_end_under_the_version_that_they_began_with(
    drawn: list[tuple[list[int], int, bool, int]], max_num_seqs: int, prefill_chunk: int, num_blocks: int
) -> None:
    runner = MockRunner(num_blocks)
    engine = Engine(runner, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)
    begun = []
    for sizes, max_tokens, base, steps in drawn:
        prompts, params = [tokens(n) for n in sizes], SamplingParams(max_tokens=max_tokens)
        runner.base = base
        begun.append((engine.begin(prompts, params), prompts, params, base, runner.version))
        runner.base = False
        for _ in range(steps):
            engine.step()
        runner.kept.append(runner.version)
        runner.version += 1
    while engine.step():
        pass
    last = runner.version
    for generation, prompts, params, base, version in begun:
        runner.base, runner.version = base, version
        assert generation.done
        for i, completion in enumerate(generation.completions):
            assert completion.finish_reason == "length"
            assert completion.adapter_version == version
            expected = runner.expect(prompts[i], params, (i, 0))
            assert (completion.token_ids, completion.logprobs) == expected
    runner.version = last
    assert engine._stepper.blocks.num_free == num_blocks


def test_one_forward_holds_rows_of_several_versions() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    params = SamplingParams(max_tokens=10)
    first = engine.begin([tokens(5, i) for i in range(3)], params)
    engine.step()
    runner.kept, runner.version = [0], 1
    second = engine.begin([tokens(40), tokens(5)], params)
    again = engine.begin([tokens(5)], params, version=0)
    engine.step()
    assert runner.runs[-1] == [("policy:0", 8), ("policy:1", 45)]
    engine.step()
    assert runner.runs[-1] == [("policy:0", 4), ("policy:1", 2)]
    while engine.step():
        pass
    versions = [c.adapter_version for g in (first, second, again) for c in g.completions]
    assert versions == [0, 0, 0, 1, 1, 0]


def test_a_version_that_leaves_takes_its_sequences_and_its_cache_with_it() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    heard: list[Completion] = []
    params = SamplingParams(max_tokens=40)
    old = engine.begin([tokens(70)], params, on_finish=lambda _, done: heard.append(done))
    engine.step()
    runner.kept, runner.version = [0], 1
    new = engine.begin([tokens(70)], params)
    engine.step()
    assert engine._stepper.blocks.namespaces() == ["policy:0", "policy:1"]
    runner.kept = []
    engine.step()
    assert engine._stepper.blocks.namespaces() == ["policy:1"]
    assert [c.finish_reason for c in old.completions] == ["abort"] == [c.finish_reason for c in heard]
    assert engine.stats.num_dropped == engine.stats.num_aborted == 1
    while engine.step():
        pass
    assert [c.finish_reason for c in new.completions] == ["length"]
    with pytest.raises(ModelError, match="not in memory"):
        engine.generate([tokens(5)], params, version=0)
    assert engine._stepper.blocks.num_free == 64


def test_a_listener_that_fails_costs_the_others_nothing() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    ended: list[int] = []

    def fail(index: int, completion: Completion) -> None:
        raise KeyboardInterrupt

    params = SamplingParams(max_tokens=3)
    bad = engine.begin([tokens(5)], params, on_finish=fail)
    engine.begin([tokens(6), tokens(7)], params, on_finish=lambda index, _: ended.append(index))
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.step():
        pass
    assert bad.done
    assert ended == [0, 1]
    cancelled = engine.begin([tokens(5)], params, on_finish=fail)
    engine.step()
    engine.cancel(cancelled)
    assert not engine.step()
    assert [c.finish_reason for c in cancelled.completions] == ["abort"]


def test_who_waits_hears_of_an_engine_that_failed() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    ended: list[tuple[int, str]] = []
    engine.begin(
        [tokens(5), tokens(6)], on_finish=lambda index, done: ended.append((index, done.finish_reason))
    )
    engine.step()
    runner.fail_at = len(runner.num_tokens)
    with pytest.raises(RuntimeError, match="on fire"):
        engine.generate([tokens(7)])
    runner.fail_at = -1
    assert engine.step()
    assert ended == [(0, "abort"), (1, "abort")]
    assert not engine.step()


FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
@torch.no_grad()
def test_mixed_batches_of_real_models(family: str, layout: str, checkpoint: Callable[[str], Path]) -> None:
    """Logits, log-probabilities and tokens are those of each version alone, and can be scored afterwards."""
    targets = ("attention", "experts", "lm_head")
    model = load_model(
        checkpoint(family), device="cpu", lora=LoraConfig(rank=3, targets=targets, expert_layout=layout)
    )
    keep_versions(model, 3)
    generator = torch.Generator().manual_seed(1)

    def update() -> None:
        retain_version(model)
        for master in lora_parameters(model).values():
            master.add_(torch.randn(master.shape, generator=generator) * 0.1)
        bump_adapter_version(model)

    prompts = [tokens(n, 3) for n in (40, 40, 3, 33)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    alone: list[list[Completion]] = []
    with Engine(model, kv_memory="16MiB") as engine, Engine(model, kv_memory="16MiB") as single:
        begun = []
        for _ in range(3):
            update()
            begun.append(engine.begin(prompts, params))
            alone.append(single.generate(prompts, params))
            for _ in range(5):
                engine.step()
        with lora_disabled(model):
            begun.append(engine.begin(prompts, params))
            alone.append(single.generate(prompts, params))
        while engine.step():
            pass
    for generation, expected in zip(begun, alone, strict=False):
        for got, want in zip(generation.completions, expected, strict=True):
            assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
            assert got.adapter_version == want.adapter_version
    assert len({tuple(c.logprobs) for done in alone for c in done}) == 16
    for generation in begun[:3]:
        for prompt, done in zip(prompts, generation.completions, strict=False):
            with adapter_at(model, done.adapter_version):
                rows = forward_hidden(model, scoring_batch([prompt + done.token_ids]))[len(prompt) - 1 : -1]
                logp, _ = head(model).logprobs(rows, torch.tensor(done.token_ids), 1.0)
            assert logp.tolist() == done.logprobs


def test_prefixes_are_found_under_their_own_version_only() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    prompt, params = tokens(3 * KV_BLOCK + 1), SamplingParams(max_tokens=1)

    def cached(version: int | None = None) -> int:
        return engine.generate([prompt], params, version=version)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 96]
    runner.kept, runner.version = [0], 1
    assert [cached(), cached(), cached(0)] == [0, 96, 96]
    runner.kept, runner.version = [1], 2
    assert [cached(), cached(1)] == [0, 96]
    assert engine._stepper.blocks.namespaces() == ["policy:1", "policy:2"]


def moving(directory: Path) -> tuple[PreTrainedModel, Callable[[], None]]:
    """A model that keeps two versions, and what an optimiser does to it."""
    model = load_model(directory, device="cpu", lora=LoraConfig(rank=3, alpha=6.0))
    keep_versions(model, 2)
    generator = torch.Generator().manual_seed(1)

    def update() -> None:
        retain_version(model)
        with torch.no_grad():
            for master in lora_parameters(model).values():
                master.add_(torch.randn(master.shape, generator=generator) * 0.02)
        bump_adapter_version(model)

    return model, update


def test_one_changed_weight_leaves_the_cache_of_other_versions_alone(
    checkpoint: Callable[[str], Path],
) -> None:
    model, update = moving(checkpoint("mixtral"))
    update()
    prompt, params = tokens(3 * KV_BLOCK + 1), SamplingParams(max_tokens=1)
    with Engine(model, kv_memory="8MiB") as engine:

        def cached(version: int | None = None) -> int:
            return engine.generate([prompt], params, version=version)[0].num_cached_tokens

        def base() -> int:
            with lora_disabled(model):
                return cached()

        assert [cached(), cached(0), base()] == [0, 0, 0]
        assert [cached(), cached(0), base()] == [96, 96, 96]
        master = next(m for name, m in lora_parameters(model).items() if "k_proj.lora_b" in name)
        with torch.no_grad():
            master[0, 0] += 1.0  # without a new number
        assert [cached(), cached(0), base()] == [0, 96, 96]
        assert engine.stats.stale_refused == 0


@pytest.mark.slow
def test_300_updates_with_two_versions_in_flight(checkpoint: Callable[[str], Path]) -> None:
    """Cache on equals cache off, and nothing is ever found, or even looked for, in a retired namespace."""
    model, update = moving(checkpoint("qwen3_moe"))
    template = tokens(2 * KV_BLOCK)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    found = {"policy": 0, "base": 0}
    blocks = 60 * KVPool.block_bytes(model)
    with Engine(model, kv_memory=blocks, max_num_seqs=6, prefill_chunk=50) as engine:
        ahead: tuple[Generation, list[list[int]], int] | None = None
        for number in range(300):
            prompts = [[*template, 3 + number % 40, 7 + i] for i in range(3)]
            begun = (engine.begin(prompts, params), prompts, adapter_version(model))
            for _ in range(number % 7):
                engine.step()  # of the generation before, too
            if ahead is None:
                ahead = begun
                update()
                continue
            (generation, prompts, version), ahead = ahead, begun
            while not generation.done:
                engine.step()
            done = generation.completions
            assert {c.adapter_version for c in done} == {version} == {adapter_version(model) - 1}
            found["policy"] += sum(c.num_cached_tokens for c in done)
            with lora_disabled(model):
                found["base"] += engine.generate(prompts[:1], params)[0].num_cached_tokens
            if number % 10 == 0:
                with Engine(model, kv_memory=blocks, max_num_seqs=1) as cold:
                    for i, prompt in enumerate(prompts):
                        cold.reset_cache()
                        (alone,) = cold.generate([prompt], params, streams=[(i, 0)], version=version)
                        assert (alone.token_ids, alone.logprobs) == (done[i].token_ids, done[i].logprobs)
            update()
        assert engine.stats.stale_refused == 0
        assert len(engine._stepper.blocks.namespaces()) <= 3
    assert found["policy"] > 0
    assert found["base"] > 250 * 2 * KV_BLOCK, "what the base model computed stays valid for ever"
