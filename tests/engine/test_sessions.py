"""Sessions: turns, forks by reference, and trips to other engines; always the bits of one long sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_runner import MockRunner

from hetero.engine import Engine, SamplingParams
from hetero.errors import ArgumentError, CheckpointError, ModelError, UnavailableError
from hetero.kernels.batch import KV_BLOCK


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i * i + i) % 50 for i in range(n)]


def up_to(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n)


def free(engine: Engine) -> int:
    return engine._stepper.blocks.num_free


@pytest.mark.parametrize("num_prompt", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("turns", [(1, 1, 1), (5, 30), (31, 33), (64,)])
def test_turns_draw_what_one_call_draws(num_prompt: int, turns: tuple[int, ...]) -> None:
    runner = MockRunner(64)
    expected = runner.expect(tokens(num_prompt), up_to(sum(turns)), (3, 4))
    engine = Engine(runner)
    session = engine.session(tokens(num_prompt), stream=(3, 4))
    computed = []
    for n in turns:
        before = sum(runner.num_tokens)
        (done,) = engine.generate([session], up_to(n))
        computed.append(sum(runner.num_tokens) - before)
        assert done.token_ids == session.token_ids[-n:]
    assert session.token_ids == tokens(num_prompt) + expected[0]
    assert session.logprobs == [None] * num_prompt + expected[1]
    assert session.num_kept == len(session.token_ids) - 1
    assert computed == [num_prompt + turns[0] - 1, *turns[1:]], "nothing is computed twice"
    session.close()
    assert session.num_kept == 0
    assert free(engine) == 64


def test_given_tokens_between_turns_are_computed_once() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    session = engine.session(tokens(40))
    engine.generate([session], up_to(10))
    session.extend(tokens(17, 3))
    said = list(session.token_ids)
    before = sum(runner.num_tokens)
    (done,) = engine.generate([session], up_to(5))
    assert (done.token_ids, done.logprobs) == runner.expect(said, up_to(5), (0, 0))
    assert done.num_cached_tokens == 49
    assert sum(runner.num_tokens) - before == 18 + 4
    assert session.logprobs[50:67] == [None] * 17


def test_a_fork_shares_all_but_the_block_that_is_written() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    session = engine.session(tokens(500))
    engine.generate([session], up_to(2))
    used = 64 - free(engine)
    assert used == 16
    forks = engine.fork(session, 16)
    assert 64 - free(engine) == used, "by reference"
    before = sum(runner.num_tokens)
    most: list[int] = []
    done = engine.generate(forks, up_to(8), on_token=lambda *_: most.append(64 - free(engine)))
    assert max(most) == 15 + 1 + 16, "one prompt, its own tail, and sixteen"
    assert sum(runner.num_tokens) - before == 16 * 8
    for i, completion in enumerate(done):
        assert completion.token_ids == runner.expect(session.token_ids, up_to(8), (0, 1 + i))[0]
    assert len({tuple(c.token_ids) for c in done}) == 16
    (rest,) = engine.generate([session], up_to(8))
    assert rest.token_ids == runner.expect(tokens(500), up_to(10), (0, 0))[0][2:]
    for each in [session, *forks]:
        each.close()
    assert free(engine) == 64


def test_a_sequence_is_forked_while_it_runs() -> None:
    runner = MockRunner(64)
    engine = Engine(runner, prefill_chunk=16)
    session = engine.session(tokens(70))
    expected = runner.expect(tokens(70), up_to(20), (0, 0))[0]
    forks = []
    for i, _ in enumerate(engine.stream(session, up_to(20))):
        if i in (0, 7):
            used = 64 - free(engine)
            forks += engine.fork(session, 2, samples=[0, 5 + i])
            assert 64 - free(engine) == used
    assert session.token_ids[70:] == expected
    for n, (same, other) in ((1, forks[:2]), (8, forks[2:])):
        start = tokens(70) + expected[:n]
        assert same.token_ids == other.token_ids == start
        assert same.num_kept == 70 + n - 1
        assert same.logprobs[70:] == session.logprobs[70 : 70 + n]
        one, two = engine.generate([same, other], up_to(9))
        assert one.token_ids == expected[n : n + 9]
        assert two.token_ids == runner.expect(start, up_to(9), other.stream)[0]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_blocks=st.sampled_from([6, 8, 12]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["turn", "turns", "extend", "fork", "close", "other", "move", "reset"]),
            st.integers(0, 7),
            st.integers(1, 40),
        ),
        max_size=14,
    ),
)
def test_sessions_in_little_memory(
    tmp_path_factory: pytest.TempPathFactory, num_blocks: int, actions: list[tuple[str, int, int]]
) -> None:
    """Whatever is dropped, preempted, copied or moved: every turn draws what its tokens say."""
    runner = MockRunner(num_blocks, context_length=150)
    engine = Engine(runner, max_num_seqs=3, prefill_chunk=20)
    sessions = [engine.session(tokens(20 + 30 * i, i), stream=(i, 0)) for i in range(2)]
    for action, which, n in actions:
        session = sessions[which % len(sessions)]
        asked = [s for s in (sessions if action == "turns" else [session]) if len(s.token_ids) < 149]
        if action in ("turn", "turns"):
            starts = [list(s.token_ids) for s in asked]
            for s, start, done in zip(asked, starts, engine.generate(asked, up_to(n)), strict=True):
                assert (done.token_ids, done.logprobs) == runner.expect(start, up_to(n), s.stream)
                assert s.token_ids == start + done.token_ids
        elif action == "extend" and len(session.token_ids) + n < 140:
            session.extend(tokens(n, which))
        elif action == "fork":
            sessions += engine.fork(session, 1 + which % 3)
        elif action == "close":
            session.close()
        elif action == "reset":
            engine.reset_cache()
        elif action == "move":
            path = engine.export_session(session, tmp_path_factory.mktemp("s") / "s.session")
            moved = engine.import_session(path)
            assert (moved.token_ids, moved.logprobs) == (session.token_ids, session.logprobs)
            sessions.append(moved)
        else:
            prompt = tokens(n, which)
            (done,) = engine.generate([prompt], up_to(n))
            assert done.token_ids == runner.expect(prompt, up_to(n), (0, 0))[0]
    for session in sessions:
        session.close()
    assert free(engine) == num_blocks
    assert engine.stats.stale_refused == 0


def test_a_session_stays_with_the_weights_with_which_it_began() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    session = engine.session(tokens(40))
    engine.generate([session], up_to(3))
    runner.version += 1
    engine.generate([tokens(5)], up_to(1))
    with pytest.raises(ModelError, match=r"began under policy:0, which is not in memory any more"):
        engine.generate([session], up_to(3))
    assert session.num_kept == 0
    again = engine.session(session.token_ids)
    assert (
        engine.generate([again], up_to(3))[0].token_ids
        == runner.expect(session.token_ids, up_to(3), (0, 0))[0]
    )


def test_a_session_may_begin_under_an_older_version() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    runner.kept, runner.version = [0], 1
    old, new = engine.session(tokens(40), version=0), engine.session(tokens(40))
    done = engine.generate([old, new], up_to(9))
    assert [c.adapter_version for c in done] == [0, 1]
    for version, completion in enumerate(done):
        assert completion.token_ids == runner.expect(tokens(40), up_to(9), (0, 0), version=version)[0]
    runner.kept = []
    with pytest.raises(ModelError, match="not in memory"):
        engine.session(tokens(40), version=0)
    waiting = engine.session(tokens(40), version=1)
    runner.version = 2
    with pytest.raises(ModelError, match="policy:1, which is not in memory any more"):
        engine.generate([waiting], up_to(9))


# --- trips


def test_a_trip_changes_no_bit(tmp_path: Path) -> None:
    for n in (0, 1, 12, 25):
        runner = MockRunner(64)
        home, away = Engine(runner, seed=11), Engine(MockRunner(64))
        session = home.session(tokens(70), stream=(2, 3))
        if n:
            home.generate([session], up_to(n))
        moved = away.import_session(home.export_session(session, tmp_path / "s"))
        assert moved.num_kept == session.num_kept == (69 + n if n else 0)
        (done,) = away.generate([moved], up_to(30 - n))
        expected = runner.expect(tokens(70), up_to(30), (2, 3), seed=11)
        assert (moved.token_ids[70:], moved.logprobs[70:]) == expected
        assert done.num_cached_tokens == (69 + n if n else 0)
        home.generate([session], up_to(30 - n))
        assert (session.token_ids, session.logprobs) == (moved.token_ids, moved.logprobs)
    assert [p.name for p in tmp_path.iterdir()] == ["s"], "no unfinished files"


def test_a_session_is_exported_while_it_runs(tmp_path: Path) -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    session = engine.session(tokens(40))
    for i, _ in enumerate(engine.stream(session, up_to(20))):
        if i == 5:
            engine.export_session(session, tmp_path / "s")
    moved = Engine(MockRunner(64)).import_session(tmp_path / "s")
    assert moved.token_ids == session.token_ids[:46]
    assert moved.num_kept == 45


def test_a_session_of_an_older_version_goes_where_that_version_is(tmp_path: Path) -> None:
    runner, other = MockRunner(64), MockRunner(64)
    home, away = Engine(runner), Engine(other)
    session = home.session(tokens(40))
    home.generate([session], up_to(3))
    runner.kept, runner.version = [0], 1
    home.generate([tokens(5)], up_to(1))
    path = home.export_session(session, tmp_path / "s")
    other.kept, other.version = [0, 1], 2
    moved = away.import_session(path)
    assert (moved.adapter_version, moved.num_kept) == (0, 42)
    (done,) = away.generate([moved], up_to(9))
    expected = other.expect(tokens(40), up_to(12), (0, 0), version=0)
    assert (moved.token_ids[40:], moved.logprobs[40:]) == expected
    assert (done.adapter_version, done.num_cached_tokens) == (0, 42)
    other.kept = [1]
    with pytest.raises(ModelError, match=r"they differ in adapter \(0 there, 2 here\)"):
        away.import_session(path)
    runner.kept = []
    with pytest.raises(ModelError, match="policy:0, which is not in memory any more"):
        home.export_session(session, tmp_path / "t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "others"}, r"they differ in weights \(mock there, others here\)"),
        ({"version": 1}, r"they differ in adapter \(0 there, 1 here\)"),
        ({"version": 1, "weights": "x"}, "they differ in adapter .*, weights"),
    ],
)
def test_another_model_refuses_it(tmp_path: Path, change: dict[str, object], message: str) -> None:
    home, runner = Engine(MockRunner(64)), MockRunner(64)
    session = home.session(tokens(40))
    home.generate([session], up_to(3))
    home.export_session(session, tmp_path / "s")
    for name, value in change.items():
        setattr(runner, name, value)
    with pytest.raises(ModelError, match=message):
        Engine(runner).import_session(tmp_path / "s")


def test_every_damage_is_an_error_or_a_recompute(tmp_path: Path) -> None:
    home, runner = Engine(MockRunner(64)), MockRunner(64)
    session = home.session(tokens(70))
    home.generate([session], up_to(3))
    path = home.export_session(session, tmp_path / "s")
    data, expected = path.read_bytes(), runner.expect(session.token_ids, up_to(9), (0, 0))
    num_errors = num_damaged = 0
    for at in [*range(40), *range(40, len(data), 29), len(data) - 1]:
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            path.write_bytes(damaged)
            engine = Engine(MockRunner(64))
            try:
                moved = engine.import_session(path)
            except CheckpointError as error:
                assert "not a whole session" in str(error)  # noqa: PT017
                num_errors += 1
                continue
            num_damaged += engine.stats.disk_refused
            (done,) = engine.generate([moved], up_to(9))
            assert (done.token_ids, done.logprobs) == expected
            assert done.num_cached_tokens in (0, 32, 64)
    assert num_errors > 80
    assert num_damaged > 30
    home.close()
    with pytest.raises(UnavailableError):
        home.import_session(path)


def test_what_does_not_fit_is_computed(tmp_path: Path) -> None:
    home, runner = Engine(MockRunner(64)), MockRunner(5)
    session = home.session(tokens(130))
    home.generate([session], up_to(3))
    path = home.export_session(session, tmp_path / "s")
    away = Engine(runner)
    held = away.session(tokens(40, 1))
    away.generate([held], up_to(2))
    moved = away.import_session(path)
    assert moved.num_kept == 3 * KV_BLOCK
    (done,) = away.generate([moved], up_to(9))
    assert done.token_ids == runner.expect(session.token_ids, up_to(9), (0, 0))[0]
    assert held.num_kept == 0


def test_mistakes_are_named(tmp_path: Path) -> None:
    engine = Engine(MockRunner(64))
    session = engine.session(tokens(40))
    pieces = engine.stream(session, up_to(5))
    next(pieces)
    with pytest.raises(ArgumentError, match="being generated"):
        session.extend([1])
    with pytest.raises(ArgumentError, match="is being generated already; fork it"):
        engine.generate([session])
    pieces.close()
    with pytest.raises(ArgumentError, match="twice; fork it"):
        engine.generate([session, session])
    with pytest.raises(ArgumentError, match="expected n >= 1"):
        engine.fork(session, 0)
    with pytest.raises(ArgumentError, match="Prompt 0 is empty"):
        engine.generate([engine.session([])])
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="not a whole session"):
        engine.import_session(tmp_path / "old")
    with pytest.raises(OSError, match="No such file"):
        engine.export_session(session, tmp_path / "nowhere" / "s")


def test_an_engine_that_fails_leaves_the_tokens() -> None:
    runner = MockRunner(64)
    engine = Engine(runner)
    session, resting = engine.session(tokens(40)), engine.session(tokens(33))
    engine.generate([resting], up_to(2))
    runner.fail_at = len(runner.num_tokens) + 3
    with pytest.raises(RuntimeError, match="on fire"):
        engine.generate([session], up_to(9))
    runner.fail_at = -1
    assert (session.num_kept, resting.num_kept) == (0, 0)
    assert len(session.token_ids) == 43
    engine.generate([session, resting], up_to(6))
    assert session.token_ids[40:] == runner.expect(tokens(40), up_to(9), (0, 0))[0]
    assert resting.token_ids[33:] == runner.expect(tokens(33), up_to(8), (0, 0))[0]
