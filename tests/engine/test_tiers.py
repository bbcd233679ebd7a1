"""RAM and disk tiers below the pool: they change what is computed, never what comes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_runner import MockRunner, MockStore

from hetero.engine import Completion, Engine, SamplingParams
from hetero.engine.kv_cache import BlockManager
from hetero.engine.stats import EngineStats
from hetero.engine.tiers import tiers as tiers_module
from hetero.engine.tiers.arena import Arena
from hetero.engine.tiers.block_file import HEADER_BYTES
from hetero.engine.tiers.directory import BlockDirectory
from hetero.engine.tiers.tiers import Tiers
from hetero.errors import ArgumentError, CapacityError, ModelError
from hetero.kernels.batch import KV_BLOCK

BYTES = MockStore.bytes_per_block


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i * i + i) % 50 for i in range(n)]


def results(completions: list[Completion]) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.logprobs, c.raw_logprobs, c.finish_reason, c.stop) for c in completions]


def forced(engine: Engine) -> Engine:
    """Computing seems to take an age, so that every tier is worth its while, however long it takes."""
    engine.stats.prefill_seconds += 1e6
    return engine


def flush(engine: Engine) -> None:
    engine._stepper.tiers._writer.flush()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# --- results


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(st.sampled_from([1, 31, 33, 64, 70, 130]), st.integers(0, 2), st.integers(1, 40)),
            min_size=1,
            max_size=6,
        ),
        min_size=2,
        max_size=4,
    ),
    num_blocks=st.sampled_from([6, 9, 30]),
    ram=st.sampled_from([0, 1, 4, 100]),
    disk=st.sampled_from([0, 3, 1000]),
    changes=st.lists(st.sampled_from(["nothing", "update", "base", "policy", "new engine"]), max_size=4),
)
def test_tiers_never_change_what_is_drawn(
    tmp_path_factory: pytest.TempPathFactory,
    rounds: list[list[tuple[int, int, int]]],
    num_blocks: int,
    ram: int,
    disk: int,
    changes: list[str],
) -> None:
    path = tmp_path_factory.mktemp("kv") if disk else None
    options = {
        "kv_ram": ram * BYTES,
        "kv_disk": path,
        "kv_disk_size": disk * (BYTES + HEADER_BYTES) or "1GiB",
    }
    runner = MockRunner(num_blocks)
    engine = forced(Engine(runner, seed=11, **options))
    for requests, change in zip(rounds, [*changes, *["nothing"] * 4], strict=False):
        prompts = [tokens(n, family) for n, family, _ in requests]
        params = [SamplingParams(max_tokens=m) for *_, m in requests]
        streams = [(n, family) for n, family, _ in requests]
        done = engine.generate(prompts, params, streams=streams)
        for completion, prompt, own, stream in zip(done, prompts, params, streams, strict=True):
            expected = runner.expect(prompt, own, stream, seed=11)
            assert (completion.token_ids, completion.logprobs) == expected
        assert engine._stepper.blocks.num_free == num_blocks
        if change == "update":
            runner.version += 1
        elif change in ("base", "policy"):
            runner.base = change == "base"
        elif change == "new engine":
            engine.close()
            engine = forced(Engine(runner, seed=11, **options))
    assert engine.stats.stale_refused == engine.stats.disk_refused == engine.stats.disk_errors == 0
    engine.close()


def test_evicted_blocks_come_back_from_ram() -> None:
    engine = forced(Engine(MockRunner(6), kv_ram=100 * BYTES))
    params = SamplingParams(max_tokens=4)
    first = engine.generate([tokens(130)], params)
    engine.generate([tokens(150, 1)], params)
    again = engine.generate([tokens(130)], params)
    assert results(again) == results(first)
    assert again[0].num_cached_tokens == 128
    stats = engine.stats
    assert stats.ram_found == stats.ram_in_time == stats.ram_faster == 128 - KV_BLOCK  # one is in the pool
    assert stats.ram_stored >= 3
    engine.reset_cache()
    assert engine.generate([tokens(130)], params)[0].num_cached_tokens == 0


def test_another_engine_finds_the_blocks_on_disk(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=40)
    with Engine(MockRunner(20), kv_disk=tmp_path) as engine:
        first = engine.generate([tokens(130)] * 3, params)
        assert (engine.stats.disk_found, engine.stats.disk_in_time) == (0, 0)
    written = engine.stats.disk_written
    assert written == 4 + 3 == len(list(tmp_path.rglob("*.kv")))  # one block of each completion
    with forced(Engine(MockRunner(20), kv_disk=tmp_path)) as engine:
        again = engine.generate([tokens(130)] * 3, params)
        assert results(again) == results(first)
        assert again[0].num_cached_tokens == 128
        stats = engine.stats
        assert stats.disk_found == stats.disk_in_time == stats.disk_faster == 128
        assert stats.prefill_tokens == 2
        longer = engine.generate([tokens(130) + first[1].token_ids + [7]], params)
        assert longer[0].num_cached_tokens == 160, "completions are written, too"
    assert stats.disk_written == 1  # of `longer`


@pytest.mark.parametrize("change", ["weights", "version"])
def test_other_weights_find_nothing_on_disk(tmp_path: Path, change: str) -> None:
    with Engine(MockRunner(20), kv_disk=tmp_path) as engine:
        engine.generate([tokens(130)])
    runner = MockRunner(20)
    setattr(runner, change, 5)
    with forced(Engine(runner, kv_disk=tmp_path)) as engine:
        done = engine.generate([tokens(130)])
        assert done[0].num_cached_tokens == engine.stats.disk_found == engine.stats.disk_refused == 0
        assert done[0].token_ids == runner.expect(tokens(130), SamplingParams(), (0, 0))[0]
    runner.base = True
    with forced(Engine(runner, kv_disk=tmp_path)) as engine:
        engine.generate([tokens(130)])
        flush(engine)
        runner.version += 1
        engine.reset_cache()
        assert engine.generate([tokens(130)])[0].num_cached_tokens == 128, "the base stays valid for ever"


def test_older_versions_use_the_disk_while_they_are_in_memory(tmp_path: Path) -> None:
    runner, params = MockRunner(20), SamplingParams(max_tokens=4)

    def found(engine: Engine, version: int) -> int:
        before = engine.stats.disk_in_time
        (done,) = engine.generate([tokens(130)], params, version=version)
        assert (done.token_ids, done.logprobs) == runner.expect(tokens(130), params, (0, 0), version=version)
        flush(engine)
        return engine.stats.disk_in_time - before

    with forced(Engine(runner, kv_disk=tmp_path)) as engine:
        assert found(engine, 0) == 0
        runner.kept, runner.version = [0], 1
        engine.reset_cache()
        assert [found(engine, 0), found(engine, 1)] == [128, 0], "its namespace is made anew, its root is not"
    runner.kept, runner.version = [0, 1], 2
    with forced(Engine(runner, kv_disk=tmp_path)) as engine:
        assert [found(engine, n) for n in (0, 1, 2)] == [128, 128, 0]
        runner.kept = [1]
        assert found(engine, 1) == 0, "it is in the pool by now"
        with pytest.raises(ModelError, match="not in memory"):
            engine.generate([tokens(130)], params, version=0)
        assert engine._stepper.blocks.namespaces() == ["policy:1", "policy:2"]
        assert engine.stats.stale_refused == 0


def test_damaged_files_are_computed_again_and_counted(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4)
    with Engine(MockRunner(20), kv_disk=tmp_path) as engine:
        first = engine.generate([tokens(130)], params)
    files = sorted(tmp_path.rglob("*.kv"), key=lambda f: f.stat().st_mtime_ns)
    for i, damage in enumerate((lambda b: b[:-1], lambda b: b[:70] + b"x" + b[71:], lambda b: b"")):
        files[1].write_bytes(damage(files[1].read_bytes()))
        with forced(Engine(MockRunner(20), kv_disk=tmp_path)) as engine:
            again = engine.generate([tokens(130)], params)
            assert results(again) == results(first), i
            assert engine.stats.disk_refused == 1
            assert again[0].num_cached_tokens == KV_BLOCK
        assert engine.stats.disk_written == 1


def test_a_disk_that_refuses_is_counted_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockDirectory, "store", full)
    engine = Engine(MockRunner(20), kv_disk=tmp_path)
    expected = Engine(MockRunner(20)).generate([tokens(130)])
    assert results(engine.generate([tokens(130)])) == results(expected)
    flush(engine)
    assert (engine.stats.disk_written, engine.stats.disk_errors) == (0, 6)


def test_a_disk_that_does_not_keep_up_loses_blocks_not_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, store = threading.Event(), BlockDirectory.store
    monkeypatch.setattr(BlockDirectory, "store", lambda *args: go.wait() and store(*args))
    monkeypatch.setattr("hetero.engine.tiers.tiers._STAGING", 5 * BYTES)
    engine = Engine(MockRunner(40), kv_disk=tmp_path)
    engine.generate([tokens(32 * 20)], SamplingParams(max_tokens=2))
    assert engine.stats.disk_dropped in (20 - 5 - 1, 20 - 5)  # one may be in the writer's hands
    go.set()
    flush(engine)
    assert engine.stats.disk_written == 20 - engine.stats.disk_dropped


def test_a_block_whose_forward_pass_failed_reaches_no_tier(tmp_path: Path) -> None:
    runner = MockRunner(40)
    engine = forced(Engine(runner, prefill_chunk=64, kv_disk=tmp_path, kv_ram=100 * BYTES))
    runner.fail_at = 1
    with pytest.raises(RuntimeError, match="on fire"):
        engine.generate([tokens(130)])
    flush(engine)
    assert engine.stats.disk_written == 2
    assert len(engine._stepper.tiers._arena) == 0


# --- the funnel


def test_a_tier_slower_than_computing_is_passed_over_and_measured_again(tmp_path: Path) -> None:
    with Engine(MockRunner(20), kv_disk=tmp_path) as engine:
        engine.generate([tokens(130)])
    engine = Engine(MockRunner(8), kv_disk=tmp_path, kv_ram=100 * BYTES)
    tiers, stats = engine._stepper.tiers, engine.stats
    stats.prefill_tokens, stats.prefill_seconds = 10**9, 1.0  # 32 ns per block
    for pace in (tiers._loader.pace, tiers._arena_pace):
        pace.seconds = 1.0
    engine.generate([tokens(130)], SamplingParams(max_tokens=1))
    eventually(lambda: stats.disk_found == 128)  # counted in the background
    assert stats.disk_in_time == 0
    used = []
    for i in range(40):
        engine.generate([tokens(200, 1 + i % 2)], SamplingParams(max_tokens=1))
        used.append(stats.ram_in_time)
    assert stats.ram_found > 0
    assert 0 < stats.ram_in_time < stats.ram_found
    assert used[0] == 0


def test_blocks_that_come_late_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MockRunner(20), kv_disk=tmp_path) as engine:
        expected = engine.generate([tokens(130)])
    go, load = threading.Event(), BlockDirectory.load
    monkeypatch.setattr(BlockDirectory, "load", lambda *args: go.wait() and load(*args))
    engine = Engine(MockRunner(20), kv_disk=tmp_path)
    engine.stats.prefill_tokens, engine.stats.prefill_seconds = 10**6, 100.0  # 3 ms per block
    done = engine.generate([tokens(130)])
    assert results(done) == results(expected)
    assert done[0].num_cached_tokens == engine.stats.disk_in_time == 0
    loader = engine._stepper.tiers._loader
    go.set()
    engine.close()
    assert loader._room._value == tiers_module._STAGING // BYTES, "what nobody waits for takes no room"


def test_running_sequences_go_on_while_blocks_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(MockRunner(20), kv_disk=tmp_path) as engine:
        expected = engine.generate([tokens(130)])
    go, load = threading.Event(), BlockDirectory.load
    monkeypatch.setattr(BlockDirectory, "load", lambda *args: go.wait() and load(*args))
    engine = forced(Engine(MockRunner(40), kv_disk=tmp_path))
    seen: list[int] = []

    def on_token(index: int, token: int) -> None:
        seen.append(index)
        if seen.count(0) == 20:
            go.set()

    done = engine.generate(
        [tokens(9), tokens(130)], SamplingParams(max_tokens=64), streams=[(1, 0), (0, 0)], on_token=on_token
    )
    assert results(done[1:]) == results(expected)
    assert done[1].num_cached_tokens == 128
    assert seen.index(1) >= 20


def test_what_waits_in_ram_for_its_sequence_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens(300, i) for i in range(6)]
    params = SamplingParams(max_tokens=2)
    with Engine(MockRunner(100), kv_disk=tmp_path) as engine:
        expected = engine.generate(prompts, params)
    monkeypatch.setattr("hetero.engine.tiers.tiers._STAGING", 5 * BYTES)
    engine = forced(Engine(MockRunner(100), kv_disk=tmp_path, max_num_seqs=2))
    done = engine.generate(prompts, params)
    assert results(done) == results(expected)
    assert [c.num_cached_tokens for c in done] == [288] * 6
    assert engine._stepper.tiers._loader._room._value == 5
    engine.generate([tokens(9)], params)
    stream = engine.stream(prompts[0], params)
    stream.close()


# --- the arena


def test_the_arena_keeps_what_was_used_last_and_drops_retired_namespaces_first() -> None:
    store = MockStore(8)
    manager, arena = BlockManager(store), Arena(store, 3 * BYTES)
    base, policy = manager.namespace("base"), manager.namespace("policy:1")
    for i in range(8):
        store.layers[:, i] = i
    assert arena.put(base, b"0", 0)
    assert arena.put(policy, b"1", 1)
    assert arena.put(base, b"2", 2)
    assert not arena.put(base, b"0", 0), "it is there; it counts as used"
    assert arena.put(base, b"3", 3)
    assert [arena.has(s, k) for s, k in ((base, b"0"), (policy, b"1"), (base, b"2"), (base, b"3"))] == [
        True,
        False,
        True,
        True,
    ]
    assert arena.put(policy, b"4", 4)
    assert not arena.has(base, b"2")
    manager.retire("policy:1")
    assert not arena.has(policy, b"4")
    assert not arena.get(policy, b"4", 7)
    assert not arena.has(manager.namespace("policy:1"), b"4"), "a new namespace of that name is another one"
    assert arena.put(base, b"5", 5)
    assert [arena.has(base, k) for k in (b"0", b"3", b"5")] == [True] * 3
    assert arena.get(base, b"3", 7)
    assert (store.layers[:, 7] == 3).all()
    arena.clear()
    assert len(arena) == 0
    assert all(arena.put(base, bytes([i]), i) for i in range(3))


def test_tiers_without_anything_do_nothing() -> None:
    store = MockStore(2)
    manager, tiers = BlockManager(store), Tiers(store, EngineStats())
    space = manager.namespace("base")
    tiers.spill(space, b"x", 0)
    tiers.commit([(space, b"x", 0)])
    assert tiers.prefetch(space, [b"x"]) is None
    assert tiers.restore(manager, space, [b"x"], [0], None) == 0
    tiers.clear()
    tiers.close()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CapacityError, match="kv_ram is 7 bytes; one block of this model's KV cache takes 512"
    ):
        Engine(MockRunner(4), kv_ram=7)
    with pytest.raises(CapacityError, match="kv_disk_size is 7 bytes"):
        Engine(MockRunner(4), kv_disk=tmp_path, kv_disk_size=7)
    with pytest.raises(ArgumentError, match="'a lot' is not a size"):
        Engine(MockRunner(4), kv_ram="a lot")
