"""The engine on real, tiny models: what is drawn and recorded does not depend on how it was computed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero.engine import Completion, Engine, SamplingParams
from hetero.kernels.batch import KV_BLOCK, AttentionBatch
from hetero.models import ForwardBatch, KVPool, forward_hidden, head, load_model, scoring_batch
from hetero.models.lora import LoraConfig, bump_adapter_version, lora_disabled, lora_parameters

FAMILIES = ["mixtral", "mixtral_window", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma2"]
TRUNCATED = {"top_p": 0.9, "top_k": 40, "min_p": 0.01}


def load(directory: Path, device: str = "cpu", dense: str = "bf16") -> PreTrainedModel:
    """A model with an adapter that matters."""
    model = load_model(directory, device=device, dense=dense, lora=LoraConfig(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.copy_(torch.randn(master.shape, generator=generator) * 0.1)
    bump_adapter_version(model)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def any_model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return load(checkpoint(request.param))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return load(checkpoint("mixtral"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two groups, three prompts with one beginning, and some others; 3 to 90 tokens."""
    generator = torch.Generator().manual_seed(7)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 128, (n,), generator=generator).tolist()

    system = ids(50)
    return [*[ids(45)] * 3, *[ids(64)] * 2, *(system + ids(n) for n in (3, 20, 40)), ids(3), ids(32), ids(90)]


def results(completions: list[Completion]) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.logprobs, c.raw_logprobs, c.finish_reason, c.stop) for c in completions]


def settings_of(prompts: list[list[int]], *, truncate: bool) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(1.0, 0.7)[i % 2],
            max_tokens=8 + 9 * (i % 4),
            ignore_eos=True,
            **(TRUNCATED if truncate and i % 3 else {}),
        )
        for i in range(len(prompts))
    ]


def test_no_setting_of_the_engine_changes_a_bit(any_model: PreTrainedModel, prompts: list[list[int]]) -> None:
    params, streams = settings_of(prompts, truncate=True), [(i, i % 3) for i in range(len(prompts))]
    block = KVPool.block_bytes(any_model)
    with Engine(any_model, kv_memory=64 * block, seed=5) as engine:
        expected = results(engine.generate(prompts, params, streams=streams))
        assert results(engine.generate(prompts, params, streams=streams)) == expected  # from the cache
        assert engine.stats.cached_tokens > sum(map(len, prompts))
    order, num_preemptions = list(range(len(prompts))), 0
    for max_num_seqs, prefill_chunk, num_blocks in ((2, 512, 64), (64, 13, 9), (5, 40, 6)):
        random.Random(prefill_chunk).shuffle(order)
        with Engine(
            any_model,
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            kv_memory=num_blocks * block,
            seed=5,
        ) as engine:
            done = engine.generate(
                [prompts[i] for i in order], [params[i] for i in order], streams=[streams[i] for i in order]
            )
            assert results(done) == [expected[i] for i in order]
            num_preemptions += engine.stats.num_preemptions
    assert num_preemptions > 0


@torch.no_grad()
def test_recorded_logprobs_are_those_that_the_trainer_computes(
    any_model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    params = settings_of(prompts, truncate=False)
    with Engine(any_model, kv_memory="16MiB") as engine:
        done = engine.generate(prompts, params)
    whole = [prompt + completion.token_ids for prompt, completion in zip(prompts, done, strict=True)]
    hidden = forward_hidden(any_model, scoring_batch(whole)).split([len(ids) for ids in whole])
    for prompt, completion, own, rows in zip(prompts, done, params, hidden, strict=True):
        logp, _ = head(any_model).logprobs(
            rows[len(prompt) - 1 : -1], torch.tensor(completion.token_ids), own.temperature
        )
        assert completion.logprobs == completion.raw_logprobs == logp.tolist()
    for completion in done:
        assert completion.adapter_version == 1
        assert max(completion.logprobs) < 0


@torch.no_grad()
def test_recorded_logprobs_are_those_of_a_batch_that_stores_the_prompt_once(
    any_model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """The layout of a training group: one prompt, and completions that look back on it."""
    prompt = prompts[0]
    with Engine(any_model, kv_memory="16MiB") as engine:
        done = engine.generate([prompt] * 4, SamplingParams(max_tokens=30, ignore_eos=True))
    rows, parts, starts = list(range(len(prompt))), [list(range(len(prompt)))], [0, len(prompt)]
    for _ in done:
        parts.append(rows + list(range(starts[-1], starts[-1] + 30)))
        starts.append(starts[-1] + 30)
    positions = [*rows, *(list(range(len(prompt), len(prompt) + 30)) * 4)]
    attention = AttentionBatch(
        q_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor([len(part) for part in parts], dtype=torch.int32),
        kv_rows=torch.tensor([row for part in parts for row in part], dtype=torch.int32),
        kv_start=torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).to(torch.int32),
    )
    tokens = prompt + [token for c in done for token in c.token_ids]
    hidden = forward_hidden(any_model, ForwardBatch(torch.tensor(tokens), torch.tensor(positions), attention))
    for start, completion in zip(starts[1:], done, strict=False):
        before = [len(prompt) - 1, *range(start, start + 29)]
        logp, _ = head(any_model).logprobs(hidden[before], torch.tensor(completion.token_ids), 1.0)
        assert completion.logprobs == logp.tolist()


def test_greedy_equals_generate_of_transformers_on_the_same_module(
    any_model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """Until two tokens are as good as equal: `generate` rounds the logits to bf16, and its sliding caches
    lose the positions to which attention aligns its blocks."""
    num_equal = 0
    with Engine(any_model, kv_memory="16MiB") as engine:
        done = engine.generate(prompts[3:9], SamplingParams(temperature=0.0, max_tokens=24))
    for prompt, completion in zip(prompts[3:9], done, strict=True):
        peer = any_model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=24, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        theirs = peer.sequences[0, len(prompt) :].tolist()
        for token, other, logits in zip(completion.token_ids, theirs, peer.logits, strict=False):
            if token != other:
                assert logits[0, other] - logits[0, token] < 0.05
                break
            num_equal += 1
        else:
            assert len(completion.token_ids) == len(theirs)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 2 else "length")
    assert num_equal > 0.5 * sum(len(completion.token_ids) for completion in done)


@torch.no_grad()
def test_greedy_equals_transformers_in_fp32(
    checkpoint: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    """But for choices that are closer than bf16 can tell, and the odd expert that is."""
    peer = AutoModelForCausalLM.from_pretrained(checkpoint("mixtral"), dtype=torch.float32)
    with Engine(load_model(checkpoint("mixtral"), device="cpu"), kv_memory="16MiB") as engine:
        done = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    best: list[bool] = []
    close: list[bool] = []
    for prompt, completion in zip(prompts, done, strict=True):
        logits = peer(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(completion.token_ids)
        logp = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        best += (logits.argmax(-1) == chosen).tolist()
        close += ((torch.tensor(completion.raw_logprobs) - logp).abs() < 0.05).tolist()
    assert sum(best) > 0.95 * len(best)
    assert sum(close) > 0.95 * len(close)


@pytest.mark.parametrize("tier", ["ram", "disk", "both"])
def test_tiers_change_no_bit(
    any_model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, tier: str
) -> None:
    """What was evicted, or left by another engine, comes back from the tier, which is made to be used."""
    params, streams = settings_of(prompts, truncate=True), [(i, i % 3) for i in range(len(prompts))]
    block = KVPool.block_bytes(any_model)
    with Engine(any_model, kv_memory=64 * block, seed=5) as engine:
        expected = results(engine.generate(prompts, params, streams=streams))
    ram, disk = "16MiB" if tier != "disk" else 0, tmp_path if tier != "ram" else None
    for attempt in range(2):
        with Engine(any_model, kv_memory=7 * block, seed=5, kv_ram=ram, kv_disk=disk) as engine:
            for _ in range(2):
                engine.stats.prefill_seconds += 1e6  # computing is never faster
                assert results(engine.generate(prompts, params, streams=streams)) == expected
            stats = engine.stats
            assert (stats.ram_in_time > 0) == (tier != "disk")
            assert stats.disk_in_time > 0 or tier == "ram" or (tier == "both" and attempt == 0)
            assert stats.stale_refused == stats.disk_refused == stats.disk_errors == 0


def test_after_an_update_no_tier_serves_the_old_adapter(
    fresh: tuple[PreTrainedModel, Engine], prompts: list[list[int]], tmp_path: Path
) -> None:
    """The base's blocks stay good, the policy's are not found; both as with a cold cache."""
    model, cold = fresh
    params, block = SamplingParams(max_tokens=12, ignore_eos=True), KVPool.block_bytes(model)

    def ask(engine: Engine) -> tuple[list[tuple[object, ...]], int]:
        before = engine.stats.cached_tokens
        engine.stats.prefill_seconds += 1e6
        done = engine.generate(prompts[-1:], params)
        return results(done), engine.stats.cached_tokens - before

    with Engine(model, kv_memory=8 * block, kv_ram="16MiB", kv_disk=tmp_path) as engine:
        for _ in range(2):
            policy, _ = ask(engine)
            with lora_disabled(model):
                base, _ = ask(engine)
        with torch.no_grad():
            next(m for n, m in lora_parameters(model).items() if "k_proj" in n and n.endswith("b"))[0, 0] += (
                3.0
            )
        new, hits = ask(engine)
        assert hits == 0
        with lora_disabled(model):
            again, hits = ask(engine)
        assert (again, hits) == (base, 64)
        assert engine.stats.stale_refused == 0
    cold.reset_cache()
    assert new == ask(cold)[0]
    assert new != policy


@pytest.fixture(scope="module")
def long_model(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedModel:
    """With room for prompts of 512 tokens."""
    directory = shutil.copytree(checkpoint("mixtral"), tmp_path_factory.mktemp("long") / "mixtral")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 640}))
    return load(directory)


@pytest.mark.parametrize("num_tokens", [512, 500])
def test_a_group_of_16_takes_one_prompt_and_16_tails(long_model: PreTrainedModel, num_tokens: int) -> None:
    """Computed once, and in a pool that has no block to spare."""
    prompt = torch.randint(3, 128, (num_tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    model, num_blocks = long_model, num_tokens // KV_BLOCK + 16
    with Engine(model, kv_memory=num_blocks * KVPool.block_bytes(model)) as engine:
        done = engine.generate([prompt] * 16, params)
        assert engine.stats.prefill_tokens == num_tokens
        assert engine.stats.decode_tokens == 16 * 9
        assert engine.stats.num_preemptions == 0
    with Engine(model, kv_memory="16MiB") as engine:
        for i in (0, 7, 15):
            engine.reset_cache()
            assert results(engine.generate([prompt], params, streams=[(i, 0)])) == results(done[i : i + 1])
    assert len({tuple(c.token_ids) for c in done}) == 16


@pytest.mark.parametrize(
    ("device", "dense"),
    [
        ("cpu", "torch"),
        pytest.param(
            "cuda",
            "bf16",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@torch.no_grad()
def test_dense_parts_in_pytorch(
    checkpoint: Callable[[str], Path], prompts: list[list[int]], device: str, dense: str
) -> None:
    """Nothing is promised bit for bit there, but the record must be close to what the trainer computes."""
    model = load(checkpoint("mixtral"), device, dense)
    with Engine(model, kv_memory=9 * KVPool.block_bytes(model), prefill_chunk=40) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        assert engine.stats.num_preemptions > 0
    close: list[bool] = []
    for prompt, completion in zip(prompts, done, strict=True):
        hidden = forward_hidden(model, scoring_batch([prompt + completion.token_ids], model.device))
        targets = torch.tensor(completion.token_ids, device=model.device)
        logp, _ = head(model).logprobs(hidden[len(prompt) - 1 : -1], targets, 1.0)
        close += ((torch.tensor(completion.logprobs) - logp.cpu()).abs() < 0.05).tolist()
    assert len(close) == 24 * len(prompts)
    assert sum(close) > 0.95 * len(close)


# --- adapters


@pytest.fixture
def fresh(checkpoint: Callable[[str], Path]) -> Iterator[tuple[PreTrainedModel, Engine]]:
    model = load(checkpoint("mixtral"))
    with Engine(model, kv_memory="16MiB") as engine:
        yield model, engine


def test_one_changed_lora_weight_empties_the_policy_cache_only(
    fresh: tuple[PreTrainedModel, Engine], prompts: list[list[int]]
) -> None:
    model, engine = fresh
    prompt, params = prompts[-1], SamplingParams(max_tokens=12, ignore_eos=True)
    master = next(m for name, m in lora_parameters(model).items() if "k_proj" in name and name.endswith("b"))

    def run() -> Completion:
        return engine.generate([prompt], params)[0]

    def run_base() -> Completion:
        with lora_disabled(model):
            return run()

    cold, base = run(), run_base()
    assert cold.token_ids != base.token_ids
    for announced in (True, False):
        assert (run().num_cached_tokens, run_base().num_cached_tokens) == (64, 64)
        before = run()
        with torch.no_grad():
            master[0, 0] += 3.0
        if announced:
            bump_adapter_version(model)
        warm = run()
        assert warm.num_cached_tokens == 0
        assert warm.logprobs != before.logprobs
        engine.reset_cache()
        assert results([run()]) == results([warm])
        assert results([run_base()]) == results([base])


def test_disabling_the_adapter_gives_the_base_model(
    fresh: tuple[PreTrainedModel, Engine], checkpoint: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    model, engine = fresh
    params = SamplingParams(max_tokens=12)
    with lora_disabled(model):
        done = engine.generate(prompts, params)
    with Engine(load_model(checkpoint("mixtral"), device="cpu"), kv_memory="16MiB") as plain:
        assert results(plain.generate(prompts, params)) == results(done)


# --- NaN


def test_a_token_that_makes_nan_harms_its_own_sequence_only(
    fresh: tuple[PreTrainedModel, Engine], checkpoint: Callable[[str], Path]
) -> None:
    """Also later, when the blocks that held its NaN keys and values belong to others."""
    model, _ = fresh
    bad = 5
    prompts = [[3, 4, 6], [7, bad, 8, *range(10, 60)], [9, 10], [bad]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    block = KVPool.block_bytes(model)
    with Engine(model, kv_memory=6 * block) as engine:
        expected = results(engine.generate(prompts, params))
        weight = model.get_input_embeddings().weight
        kept = weight[bad].clone()
        with torch.no_grad():
            weight[bad] = float("nan")
        bump_adapter_version(model)
        try:
            for _ in range(3):
                done = engine.generate(prompts, params)
                for i, completion in enumerate(done):
                    if bad in prompts[i]:
                        assert completion.finish_reason == "abort"
                        assert "NaN" in completion.message
                        assert completion.token_ids == []
                    elif bad in expected[i][0]:
                        cut = expected[i][0].index(bad) + 1
                        assert completion.token_ids == expected[i][0][:cut]
                    else:
                        assert results([completion]) == [expected[i]]
        finally:
            with torch.no_grad():
                weight[bad] = kept


def test_the_pool_is_allocated_once_and_given_back(model: PreTrainedModel) -> None:
    engine = Engine(model, kv_memory=40 * KVPool.block_bytes(model))
    pool = engine._stepper.blocks.store
    assert pool.num_blocks == 40
    places = [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in pool.layers]
    engine.generate([[3] * KV_BLOCK * 3] * 4, SamplingParams(max_tokens=40))
    assert [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in pool.layers] == places
    engine.close()
    assert not any(isinstance(kept, KVPool) for kept in vars(engine).values())
