"""The engine over a mock model whose draws depend on the whole context, against plain recomputation."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_runner import MockRunner
from transformers import PreTrainedTokenizerFast

from hetero.engine import Completion, Engine, SamplingParams
from hetero.errors import ArgumentError, CapacityError, UnavailableError
from hetero.kernels.batch import KV_BLOCK


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i * i + i) % 50 for i in range(n)]


def results(completions: list[Completion]) -> list[tuple[object, ...]]:
    """All that must not depend on how the work was scheduled."""
    return [(c.token_ids, c.logprobs, c.raw_logprobs, c.finish_reason, c.stop) for c in completions]


requests = st.lists(
    st.tuples(
        st.sampled_from([1, 5, 31, 32, 33, 64, 70, 100]),  # prompt tokens
        st.integers(0, 2),  # which family of prompts: prompts of one family share prefixes
        st.integers(1, 40),  # max_tokens
        st.sampled_from([0.0, 0.7, 1.0]),
        st.sampled_from([1.0, 0.6]),
        st.integers(0, 3),  # sample
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=requests,
    max_num_seqs=st.sampled_from([1, 2, 3, 16]),
    prefill_chunk=st.sampled_from([1, 7, 32, 50, 512]),
    num_blocks=st.sampled_from([5, 7, 12, 200]),
    order=st.randoms(use_true_random=False),
)
def test_results_are_those_of_each_sequence_alone(
    drawn: list[tuple[int, int, int, float, float, int]],
    max_num_seqs: int,
    prefill_chunk: int,
    num_blocks: int,
    order: object,
) -> None:
    order.shuffle(drawn)
    runner = MockRunner(num_blocks, eos_ids=frozenset({3}))
    engine = Engine(runner, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk, seed=11)
    prompts = [tokens(n, family) for n, family, *_ in drawn]
    params = [
        SamplingParams(temperature=t, top_p=p, max_tokens=m, stop_ids=(9,)) for _, _, m, t, p, _ in drawn
    ]
    streams = [(n, sample) for n, *_, sample in drawn]
    for _ in range(2):  # the second time over a warm prefix cache
        done = engine.generate(prompts, params, streams=streams)
        for completion, prompt, own, stream in zip(done, prompts, params, streams, strict=True):
            expected = runner.expect(prompt, own, stream, seed=11)
            assert (completion.token_ids, completion.logprobs) == expected
    assert engine.stats.num_finished == 2 * len(drawn)
    assert engine._stepper.blocks.num_free == num_blocks
    assert max(runner.num_segments) <= max_num_seqs
    assert max(runner.num_tokens) <= max_num_seqs + prefill_chunk


def test_equal_completions_compare_equal() -> None:
    """Arrays of routes among their fields do not make a comparison fail."""
    one, two = (Engine(MockRunner(64)).generate([tokens(9)]) for _ in range(2))
    assert one[0].routes is not None
    assert one == two
    assert one != Engine(MockRunner(64)).generate([tokens(9, 1)])


def test_preemption_happens_and_changes_nothing() -> None:
    prompts = [tokens(20 + i, i) for i in range(8)]
    params = SamplingParams(max_tokens=100)
    roomy = Engine(MockRunner(200)).generate(prompts, params)
    tight = Engine(MockRunner(9))
    assert results(tight.generate(prompts, params)) == results(roomy)
    assert tight.stats.num_preemptions > 0


def test_a_leader_that_is_preempted_starts_again_and_still_leads() -> None:
    """The first sequence outgrows its blocks while the group's prompt is half computed."""
    runner = MockRunner(5)
    engine = Engine(runner, max_num_seqs=2, prefill_chunk=2)
    prompts = [tokens(31), *[tokens(90, 1)] * 3]
    params = [SamplingParams(max_tokens=60), *[SamplingParams(max_tokens=2)] * 3]
    done = engine.generate(prompts, params)
    for i, completion in enumerate(done):
        assert completion.token_ids == runner.expect(prompts[i], params[i], (i, 0))[0]
    assert engine.stats.num_preemptions == 1
    # The rest of the first prompt's last chunk, then a chunk beside each token up to position 63.
    computed_before = 1 + 2 * (64 - 31)
    assert computed_before < 90
    found_again = done[1].num_cached_tokens
    assert found_again in (32, 64)  # what the first sequence did not need
    assert engine.stats.prefill_tokens == 31 + computed_before + 90 - found_again
    assert [c.num_cached_tokens for c in done[2:]] == [90, 90]


def test_a_prompt_does_not_take_the_blocks_that_running_sequences_are_about_to_need() -> None:
    prompts = [tokens(31), tokens(31, 1), tokens(33, 2)]
    engine = Engine(MockRunner(5))
    engine.generate(prompts, SamplingParams(max_tokens=20))
    assert engine.stats.num_preemptions == 0
    group = Engine(MockRunner(6))
    group.generate([*prompts[:2], *[tokens(40, 2)] * 2], SamplingParams(max_tokens=20))
    assert group.stats.num_preemptions == 0


@pytest.mark.parametrize("max_num_seqs", [64, 16, 5, 1])
@pytest.mark.parametrize("prefill_chunk", [512, 100])
def test_a_group_computes_its_prompt_once(max_num_seqs: int, prefill_chunk: int) -> None:
    runner = MockRunner(64)
    engine = Engine(runner, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)
    params = SamplingParams(max_tokens=8)
    done = engine.generate([tokens(512)] * 16, params, streams=[(0, i) for i in range(16)])
    assert engine.stats.prefill_tokens == 512
    assert engine.stats.cached_tokens == 15 * 512
    assert engine.stats.decode_tokens == 16 * 7
    assert engine.stats.sampled_tokens == 16 * 8
    assert [c.num_cached_tokens for c in done] == [0] + [512] * 15
    assert len({tuple(c.token_ids) for c in done}) == 16
    assert sum(runner.num_tokens) == 512 + 16 * 7


@pytest.mark.parametrize("num_tokens", [500, 512])
def test_a_group_takes_the_memory_of_one_prompt_and_its_tails(num_tokens: int) -> None:
    """Full blocks once, and 16 tails, for each of which one block is enough for 12 more tokens."""
    engine = Engine(MockRunner(num_tokens // KV_BLOCK + 16))
    free: list[int] = []
    blocks = engine._stepper.blocks
    engine.generate(
        [tokens(num_tokens)] * 16,
        SamplingParams(max_tokens=12),
        on_token=lambda *_: free.append(blocks.num_free),
    )
    assert engine.stats.prefill_tokens == num_tokens
    assert engine.stats.num_preemptions == 0
    assert min(free) == 0


def test_an_aligned_group_needs_no_copies() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    engine.generate([tokens(2 * KV_BLOCK)] * 4, SamplingParams(max_tokens=4))
    assert runner.store.copied == []
    assert engine.stats.prefill_tokens == 2 * KV_BLOCK


def test_prompts_with_one_beginning_share_it_within_a_step_and_across_calls() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    system = tokens(100)
    prompts = [[*system, i] for i in range(4)]
    engine.generate(prompts, SamplingParams(max_tokens=1))
    assert len(runner.num_tokens) == 1  # all in one pass, though they share blocks that it writes
    assert engine.stats.prefill_tokens == 101 + 3 * (101 - 96)
    assert engine.stats.cached_tokens == 3 * 96
    before = engine.stats.copy()
    engine.generate([[*system, 9]], SamplingParams(max_tokens=1))
    assert (engine.stats - before).cached_tokens == 96
    assert (engine.stats - before).prefill_tokens == 5


def test_the_next_turn_finds_the_turn_before() -> None:
    engine = Engine(MockRunner(64))
    first = tokens(40)
    reply = engine.generate([first], SamplingParams(max_tokens=60))[0]
    second = [*first, *reply.token_ids, 1, 2, 3]
    before = engine.stats.copy()
    done = engine.generate([second], SamplingParams(max_tokens=1))[0]
    assert done.num_cached_tokens == 96  # 99 tokens have been computed: three full blocks
    assert (engine.stats - before).prefill_tokens == len(second) - 96


def test_an_update_of_the_adapter_empties_the_policy_cache_and_not_the_base_cache() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    prompt, params = tokens(100), SamplingParams(max_tokens=20)

    def cached() -> int:
        completion = engine.generate([prompt], params)[0]
        assert completion.adapter_version == runner.version
        assert completion.token_ids == runner.expect(prompt, params, (0, 0))[0]
        return completion.num_cached_tokens

    assert [cached(), cached()] == [0, 96]
    runner.base = True
    assert [cached(), cached()] == [0, 96]
    runner.base = False
    assert cached() == 96
    runner.version += 1
    assert [cached(), cached()] == [0, 96]
    runner.base = True
    assert cached() == 96
    assert engine._stepper.blocks.namespaces() == ["base", "policy:1"]
    engine.reset_cache()
    assert cached() == 0


def test_a_reset_may_spare_the_base_model() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)

    def cached(base: bool) -> int:
        runner.base = base
        return engine.generate([tokens(40)], SamplingParams(max_tokens=2))[0].num_cached_tokens

    assert [cached(True), cached(False)] == [0, 0]
    engine.reset_cache(base=False)
    assert [cached(True), cached(False)] == [KV_BLOCK, 0]
    engine.reset_cache()
    assert [cached(True), cached(False)] == [0, 0]


def test_sampling_the_same_stream_again_gives_the_same_and_another_seed_another() -> None:
    engine = Engine(MockRunner(64), seed=1)
    prompts = [tokens(10)] * 3
    params = SamplingParams(max_tokens=20)
    first = engine.generate(prompts, params, streams=[(4, 0), (4, 1), (5, 0)])
    again = engine.generate(prompts[:1], params, streams=[(4, 1)])
    assert again[0].token_ids == first[1].token_ids
    assert len({tuple(c.token_ids) for c in first}) == 3
    other = engine.generate(prompts[:1], SamplingParams(max_tokens=20, seed=2), streams=[(4, 1)])
    assert other[0].token_ids != again[0].token_ids
    assert results(engine.generate(prompts[:1], SamplingParams(max_tokens=20, seed=1), streams=[(4, 1)])) == (
        results(again)
    )


def test_uniform_logits_give_uniform_tokens() -> None:
    runner = MockRunner(64, vocab_size=8, flat=True)
    done = Engine(runner).generate([[1]] * 40, SamplingParams(max_tokens=50))
    counts = [sum(c.token_ids.count(i) for c in done) for i in range(8)]
    expected = 2000 / 8
    assert sum((n - expected) ** 2 / expected for n in counts) < 24.3  # chi square, 7 degrees, 0.1 %
    assert {lp for c in done for lp in c.logprobs} == {done[0].logprobs[0]}
    assert math.isclose(done[0].logprobs[0], -math.log(8), rel_tol=1e-6)


# --- endings


def test_eos_stop_ids_and_length() -> None:
    runner = MockRunner(64, eos_ids=frozenset({3}))
    engine = Engine(runner)
    prompts = [tokens(5)] * 20
    done = engine.generate(prompts, SamplingParams(max_tokens=60, stop_ids=(9, 10)))
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for completion in done:
        ended = completion.token_ids[-1] in (3, 9, 10)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.stop == (completion.token_ids[-1] if ended else None)
        assert not {3, 9, 10} & set(completion.token_ids[:-1])
        assert ended or len(completion.token_ids) == 60
        assert len(completion.logprobs) == len(completion.raw_logprobs) == len(completion.token_ids)
    free = engine.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    assert {c.finish_reason for c in free} == {"length"}
    assert any(3 in c.token_ids for c in free)


def test_the_context_ends_a_sequence() -> None:
    engine = Engine(MockRunner(64, context_length=64))
    done = engine.generate([tokens(60), tokens(63)], SamplingParams(max_tokens=1000))
    assert [(len(c.token_ids), c.finish_reason) for c in done] == [(4, "length"), (1, "length")]


def test_stop_strings(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    runner = MockRunner(64, vocab_size=len(tiny_tokenizer))
    engine = Engine(runner, tokenizer=tiny_tokenizer)
    params = SamplingParams(max_tokens=200, stop=("a", "zz", "\N{SNOWMAN}"))
    done = engine.generate([tokens(5)] * 10, params)
    assert any(c.stop == "a" for c in done)
    for completion in done:
        text = tiny_tokenizer.decode(completion.token_ids)
        before = tiny_tokenizer.decode(completion.token_ids[:-1])
        if completion.stop == "a":
            assert text.count("a") == 1
        assert "a" not in before
        assert completion.token_ids == runner.expect(tokens(5), params, (done.index(completion), 0))[0][
            : len(completion.token_ids)
        ]  # fmt: skip


def test_the_tokenizers_eos_ends_too(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    runner = MockRunner(64, vocab_size=8)
    done = Engine(runner, tokenizer=tiny_tokenizer).generate([[1]] * 4, SamplingParams(max_tokens=400))
    assert {c.stop for c in done} == {tiny_tokenizer.eos_token_id}


def test_nan_logits_abort_one_sequence_and_no_other() -> None:
    """Token 7 poisons a context: prompts with it end at once, others when they draw it."""
    runner, sane = MockRunner(64, bad_token=7), MockRunner(64)
    engine = Engine(runner)
    prompts = [[1, 2], [1, 7, 2], [3, 4], [1, 7, 2], *([5, i] for i in range(10))]
    done = engine.generate(prompts, SamplingParams(max_tokens=30))
    expected = Engine(sane).generate(prompts, SamplingParams(max_tokens=30))
    for prompt, completion, other in zip(prompts, done, expected, strict=True):
        full = prompt + other.token_ids
        if 7 in full[:-1]:
            assert completion.finish_reason == "abort"
            assert completion.token_ids == full[: full.index(7) + 1][len(prompt) :]
            assert f"position {max(full.index(7) + 1, len(prompt))} hold a NaN" in completion.message
        else:
            assert results([completion]) == results([other])
    assert done[1].finish_reason == done[3].finish_reason == "abort"
    assert {c.finish_reason for c in done} == {"abort", "length"}
    assert engine.stats.num_aborted == sum(c.finish_reason == "abort" for c in done)
    assert engine._stepper.blocks.num_free == 64


# --- requests


def test_bad_requests_are_refused_before_anything_runs() -> None:
    runner = MockRunner(4, context_length=400)
    engine = Engine(runner)
    ok = SamplingParams(max_tokens=4)
    for prompts, params, error, message in [
        ([[1], []], ok, ArgumentError, "Prompt 1 is empty"),
        (
            [[1], [2], [50]],
            ok,
            ArgumentError,
            "Prompt 2 holds the token id 50; the model knows the ids 0 to 49",
        ),
        ([[1, -1]], ok, ArgumentError, "Prompt 0 holds the token id -1"),
        ([[1], [2, 1.5]], ok, ArgumentError, r"Prompt 1 is \[2, 1.5\]; expected token ids"),
        (["a text"], ok, ArgumentError, "Prompt 0 is 'a text'; expected token ids.*tokenizer"),
        ("a text", ok, ArgumentError, "The prompts are 'a text'; expected a list of lists"),
        ([1, 2], ok, ArgumentError, "Prompt 0 is 1; expected token ids"),
        (None, ok, ArgumentError, "The prompts are None"),
        ([[1]], {"max_tokens": 3}, ArgumentError, "expected SamplingParams"),
        ([[1], tokens(400)], ok, CapacityError, "Prompt 1 has 400 tokens; the model's context of 400"),
        ([[1], tokens(126)], ok, CapacityError, "Prompt 1 has 126 tokens and may grow to 130; .* 129"),
        ([[1], [2]], [ok], ArgumentError, "1 params for 2 prompts"),
        ([[1]], SamplingParams(stop="x"), ArgumentError, "need a tokenizer"),
    ]:
        with pytest.raises(error, match=message):
            engine.generate(prompts, params)
    with pytest.raises(ArgumentError, match="1 streams for 2 prompts"):
        engine.generate([[1], [2]], ok, streams=[(0, 0)])
    assert runner.num_tokens == []
    assert len(engine.generate([tokens(125)], ok)[0].token_ids) == 4
    assert engine.generate([]) == []


def test_bad_settings() -> None:
    with pytest.raises(ArgumentError, match="max_num_seqs=0"):
        Engine(MockRunner(), max_num_seqs=0)
    with pytest.raises(ArgumentError, match="prefill_chunk=0"):
        Engine(MockRunner(), prefill_chunk=0)


def test_callbacks_see_every_token_and_every_end() -> None:
    engine = Engine(MockRunner(64), max_num_seqs=3)
    seen: dict[int, list[int]] = {}
    ended: dict[int, Completion] = {}
    done = engine.generate(
        [tokens(5, i) for i in range(8)],
        [SamplingParams(max_tokens=3 + i) for i in range(8)],
        on_token=lambda i, token: seen.setdefault(i, []).append(token),
        on_finish=lambda i, completion: ended.setdefault(i, completion),
    )
    assert [seen[i] for i in range(8)] == [c.token_ids for c in done]
    assert [ended[i] for i in range(8)] == done
    assert list(ended) == sorted(ended, key=lambda i: (i // 3, i))  # first come, first served


def test_an_exception_in_a_callback_or_the_model_leaves_a_usable_engine() -> None:
    runner = MockRunner(64)
    engine = Engine(runner, prefill_chunk=16)
    prompts, params = [tokens(40, i) for i in range(4)], SamplingParams(max_tokens=40)
    expected = results(engine.generate(prompts, params))

    def interrupt(index: int, token: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params, on_token=interrupt)
    assert engine._stepper.blocks.num_free == 64
    assert results(engine.generate(prompts, params)) == expected
    for ahead in (0, 1, 5, 20):
        engine.reset_cache()
        runner.fail_at = len(runner.num_tokens) + ahead
        with pytest.raises(RuntimeError, match="on fire"):
            engine.generate(prompts, params)
        runner.fail_at = -1
        runner.store.layers[:] = 123456789  # what a failed pass left behind must never be read
        assert results(engine.generate(prompts, params)) == expected
        assert engine._stepper.blocks.num_free == 64


# --- streaming


def test_a_stream_yields_what_generate_returns(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Engine(MockRunner(64, vocab_size=len(tiny_tokenizer)), tokenizer=tiny_tokenizer)
    params = SamplingParams(max_tokens=50, stop=("b", "c"))
    expected = engine.generate([tokens(9)], params, streams=[(3, 4)])
    pieces = list(engine.stream(tokens(9), params, stream=(3, 4)))
    assert [p.token_id for p in pieces] == expected[0].token_ids
    assert [p.logprob for p in pieces] == expected[0].logprobs
    assert [p.completion for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert results([pieces[-1].completion]) == results(expected)
    text = tiny_tokenizer.decode(expected[0].token_ids, skip_special_tokens=True)
    shown = "".join(p.text for p in pieces)
    assert shown == (text[: text.index(expected[0].stop)] if expected[0].stop else text)


def test_streams_and_calls_interleave() -> None:
    runner = MockRunner(64)
    engine = Engine(runner, max_num_seqs=2)
    params = SamplingParams(max_tokens=30)
    one = engine.stream(tokens(70), params, stream=(0, 1))
    two = engine.stream(tokens(70), params, stream=(0, 2))
    got = [[next(one).token_id], [next(two).token_id]]
    inner = engine.generate([tokens(33)], params)
    got[1] += [p.token_id for p in two]
    got[0] += [p.token_id for p in one]
    assert inner[0].token_ids == runner.expect(tokens(33), params, (0, 0))[0]
    for sample, token_ids in enumerate(got, 1):
        assert token_ids == runner.expect(tokens(70), params, (0, sample))[0]


def test_a_reader_who_leaves_ends_the_sequence() -> None:
    engine = Engine(MockRunner(64))
    stream = engine.stream(tokens(70), SamplingParams(max_tokens=30))
    next(stream)
    assert engine._stepper.blocks.num_free < 64
    stream.close()
    assert engine._stepper.blocks.num_free == 64
    assert engine._stepper.scheduler.sequences == []
    with pytest.raises(ArgumentError, match="Prompt 0 is empty"):
        engine.stream([])


def test_a_stream_that_outlives_its_adapter_is_aborted() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    stream = engine.stream(tokens(5), SamplingParams(max_tokens=30))
    first = next(stream).token_id
    runner.version += 1
    last = list(stream)[-1]
    assert last.token_id is None
    assert last.completion.finish_reason == "abort"
    assert last.completion.token_ids == [first]
    assert "adapter changed from policy:0 to policy:1" in last.completion.message


# --- resources


def test_close_gives_the_memory_back() -> None:
    runner = MockRunner(64)
    memory = weakref.ref(runner.store)
    with Engine(runner) as engine:
        engine.generate([tokens(5)])
        held = runner
        del runner
        held.store = None
    del held
    gc.collect()
    assert memory() is None
    assert engine.stats.num_finished == 1
    for call in (lambda: engine.generate([[1]]), engine.reset_cache, lambda: engine.stream([1])):
        with pytest.raises(UnavailableError, match="closed"):
            call()
    engine.close()


def test_stats_split_the_time_of_a_step() -> None:
    engine = Engine(MockRunner(64))
    engine.generate([tokens(50, i) for i in range(4)], SamplingParams(max_tokens=10))
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens, stats.sampled_tokens) == (200, 36, 40)
    assert stats.num_steps == 10
    parts = (stats.prefill_seconds, stats.decode_seconds, stats.sample_seconds, stats.schedule_seconds)
    assert all(seconds > 0 for seconds in parts)
    assert math.isclose(stats.seconds, sum(parts))
    nothing = stats - stats.copy()
    assert nothing.num_steps == nothing.seconds == 0
