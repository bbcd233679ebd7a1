from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import strange_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import RewardError
from hetero.rl.rewards import RewardPool, RewardSpec, Sample

HERE = Path(__file__).parent
STRANGE = f"{HERE / 'strange_rewards.py'}:"
BY_NAME = STRANGE + "by_name"


def _samples(*completions: str, **columns: object) -> list[Sample]:
    return [Sample("p", completion, columns) for completion in completions]


def _scores(pool: RewardPool, *completions: str, **columns: object):
    return pool.gather([pool.submit(sample) for sample in _samples(*completions, **columns)])


def _children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.split()
    pairs = list(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))
    below = [pid]
    for parent in below:
        below += [child for child, its in pairs if its == parent]
    return below[1:]


def _alive(pids: list[int]) -> list[int]:
    """Processes that exist, zombies too."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _eventually(check: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not check() and time.monotonic() < end:
        time.sleep(0.02)
    return check()


@pytest.fixture(scope="module")
def strange() -> Iterator[RewardPool]:
    with RewardPool([BY_NAME], num_workers=2, timeout=2.0, max_failed=1.0) as pool:
        yield pool


@pytest.mark.parametrize(
    ("completion", "kind", "message"),
    [
        ("hang", "timeout", "no answer within 2 s; its process was ended"),
        ("hang in C", "timeout", "no answer"),
        ("hang deaf", "timeout", "no answer"),
        ("raise", "exception", "ZeroDivisionError: division by zero"),
        ("sys.exit", "exception", "SystemExit: 1"),
        ("interrupt", "exception", "KeyboardInterrupt"),
        ("unknown", "exception", "KeyError: 'unknown'"),
        ("exit", "crash", "its process exited with status 3"),
        ("kill", "crash", "its process was killed by SIGKILL"),
        ("abort", "crash", "its process was killed by SIGABRT"),
        ("nan", "nonfinite", "returned nan"),
        ("inf", "nonfinite", "returned inf"),
        ("text", "bad_result", "returned 'xxxx"),
        ("empty dict", "bad_result", "without `reward` or `score`"),
        ("scribble", "crash", "its process sent what is no answer"),
        ("children", "timeout", "no answer"),
    ],
)
def test_a_failure_masks_its_sample_only(strange, completion, kind, message):
    before, bad, after = _scores(strange, "value 1", completion, "value 2")
    assert (before.total, after.total) == (1.0, 2.0)
    assert bad.total is None
    assert bad.values == {"by_name": None}
    (failure,) = bad.failures
    assert (failure.reward, failure.kind) == ("by_name", kind)
    assert message in failure.message
    assert len(failure.message) < 10_000


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("none", None),
        ("true", 1.0),
        ("print", 1.0),
        ("value -2.5", -2.5),
        ("dict", 0.5),
        ("fork", 1.0),
        ("fork and exit", 1.0),
    ],
)
def test_what_is_no_failure(strange, completion, value):
    (score,) = _scores(strange, completion)
    assert (score.total, score.failures) == (value, [])
    assert score.parts == ({"by_name/acc": 1.0} if completion == "dict" else {})


def test_a_traceback_begins_in_the_users_code(strange):
    (score,) = _scores(strange, "raise")
    lines = score.failures[0].message.splitlines()
    assert "strange_rewards.py" in lines[1]
    assert "worker.py" not in score.failures[0].message


def test_hanging_samples_of_a_step_cost_one_time_limit_per_worker():
    with RewardPool([BY_NAME], num_workers=2, timeout=2.0, max_failed=0.2) as pool:
        begin = time.monotonic()
        scores = _scores(pool, *["value 3"] * 31, "hang", *["value 3"] * 31, "hang")
        assert time.monotonic() - begin < 6.0
    assert [score.total for score in scores].count(3.0) == 62
    assert [score.failures[0].kind for score in scores if score.total is None] == ["timeout"] * 2


@settings(deadline=None, max_examples=8)
@given(st.lists(st.sampled_from(["value", "sleep", "raise", "none", "exit"]), max_size=20), st.randoms())
def test_order_of_results_is_that_of_tickets(strange, kinds, chance: random.Random):
    names, wanted = [], []
    for number, kind in enumerate(kinds):
        names.append({"value": f"value {number}", "sleep": f"sleep {chance.random() / 50}"}.get(kind, kind))
        wanted.append({"value": float(number), "sleep": 1.0}.get(kind))
    tickets = [strange.submit(sample) for sample in _samples(*names)]
    order = list(range(len(tickets)))
    chance.shuffle(order)
    scores = strange.gather([tickets[i] for i in order])
    assert [score.total for score in scores] == [wanted[i] for i in order]


def test_several_functions_and_weights():
    specs = [
        RewardSpec(BY_NAME, weight=2.0),
        RewardSpec("last_number", weight=0.5),
        RewardSpec(BY_NAME, weight=-1.0),
    ]
    with RewardPool(specs, timeout=5, max_failed=1.0) as pool:
        assert pool.names == ["by_name", "last_number", "by_name_2"]
        value, nothing, failed = _scores(pool, "value 3", "none", "raise", answer=3)
    assert value.values == {"by_name": 3.0, "last_number": 1.0, "by_name_2": 3.0}
    assert value.total == 2 * 3 + 0.5 * 1 - 3
    assert nothing.total == 0.0, "where a function does not apply the others count"
    assert failed.total is None, "a partial sum would be a wrong reward"
    assert [failure.reward for failure in failed.failures] == ["by_name", "by_name_2"]


def test_arguments_are_trls():
    options = {"bonus": 10}
    with RewardPool([RewardSpec(STRANGE + "everything", options=options), STRANGE + "strict"]) as pool:
        sample = Sample("p", "4", {"answer": "4", "other": None}, completion_ids=[7, 8], step=100)
        (score,) = pool.gather([pool.submit(sample)])
        pool.check_columns({"answer", "other"})
        with pytest.raises(RewardError, match=r"needs a column 'answer'.*has answers.*If 'answers' is meant"):
            pool.check_columns({"answers"})
    assert score.values == {"everything": 114.0, "strict": 1.0}
    assert score.parts == {"seen": 2.0}


def test_a_required_option_needs_no_column():
    with RewardPool([RewardSpec("max_words", options={"max_words": 2})]) as pool:
        pool.check_columns(set())
        assert [s.total for s in _scores(pool, "a b", "a b c", "")] == [1.0, 0.0, 0.0]


def test_conversations_arrive_as_messages():
    with RewardPool(["last_number"]) as pool:
        said = [{"role": "assistant", "content": "It is 4."}]
        sample = Sample([{"role": "user", "content": "2+2?"}], said, {"answer": 4})
        assert pool.gather([pool.submit(sample)])[0].total == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [("wrong_count", "returned 2 rewards for 1 completions"), ("not_a_list", "returned 1.0 where a list")],
)
def test_results_of_the_wrong_shape(name, message):
    with RewardPool([STRANGE + name], max_failed=1.0) as pool:
        assert message in _scores(pool, "x")[0].failures[0].message


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (STRANGE + "as_array", 0.25),
        (STRANGE + "Judge", 0.75),
        (STRANGE + "twice", 6.0),
        ("strange_rewards:twice", 6.0),
        (strange_rewards.twice, 6.0),
        (strange_rewards.Judge(0.5), 0.5),
        (RewardSpec(strange_rewards.scaled, options={"factor": 3}), 9.0),
    ],
)
def test_functions_in_every_guise(reward, value):
    with RewardPool([reward]) as pool:
        assert _scores(pool, "abc")[0].total == value


def test_relative_paths_and_neighbours(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("VALUE = 5.0\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour import VALUE\ndef f(completions, **k): return [VALUE]\n"
    )
    monkeypatch.chdir(tmp_path)
    with RewardPool(["mine.py:f", RewardSpec("mine:f", name="again")]) as pool:
        assert _scores(pool, "x")[0].values == {"f": 5.0, "again": 5.0}


def test_functions_of_the_main_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from hetero.rl.rewards import RewardPool, Sample\n"
        "def mine(completions, **columns): return [7.0]\n"
        "if __name__ == '__main__':\n"
        "    with RewardPool([mine]) as pool:\n"
        "        print(pool.gather([pool.submit(Sample('p', 'c', {}))])[0].total)\n"
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=_environment(), check=False
    )
    assert result.stdout == "7.0\n", result.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("last_numbr", "Did you mean last_number"),
        ("missing.py:f", "no file missing.py"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
        (STRANGE + "nothing", "has no function 'nothing'"),
        (STRANGE + "HERE", "has no function"),
        (f"{HERE / 'broken_rewards.py'}:f", "RuntimeError: cannot be imported"),
        ("sys:path", "path is not a function"),
        (lambda completions, **columns: [1.0], "no lambda"),
    ],
)
def test_a_function_that_cannot_be_had_is_told_at_once(reward, message):
    with pytest.raises(RewardError, match=message):
        RewardPool([reward])


def test_an_import_that_hangs_or_kills_is_told(tmp_path):
    with pytest.raises(RewardError, match="took longer than 1 s"):
        RewardPool([f"{HERE / 'hanging_rewards.py'}:f"], startup_timeout=1.0)
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(RewardError, match="exited with status 9"):
        RewardPool([f"{tmp_path / 'deadly.py'}:f"])
    with pytest.raises(RewardError, match="at least one"):
        RewardPool([])


def test_too_many_failures_stop_the_step_and_nothing_else():
    with RewardPool([BY_NAME], timeout=5, max_failed=0.2) as pool:
        assert len(_scores(pool, *["value 1"] * 4, "raise")) == 5, "exactly the fifth is allowed"
        with pytest.raises(RewardError) as caught:
            _scores(pool, *["value 1"] * 3, "raise", "nan")
        said = str(caught.value)
        assert "2 of 5 samples (40%)" in said
        assert "by_name 1 x exception, by_name 1 x nonfinite" in said
        assert "ZeroDivisionError" in said
        assert _scores(pool, "value 8")[0].total == 8.0, "the pool goes on"


def test_groups_are_scored_together():
    specs = [RewardSpec(STRANGE + "rank", per="group"), BY_NAME]
    with RewardPool(specs, num_workers=2, max_failed=1.0) as pool:
        tickets = []
        for number in (3, 1, 2):
            for group in (0, 1):
                sample = Sample(f"p{group}", f"value {number}", {}, group=group, group_size=3)
                tickets.append(pool.submit(sample))
        alone = pool.submit(Sample("p", "value 9", {}))
        short = [pool.submit(Sample("q", f"value {n}", {}, group="short", group_size=3)) for n in (2, 1)]
        scores = pool.gather([*tickets, alone, *short])
    assert [score.values["rank"] for score in scores] == [2.0, 2.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert [score.values["by_name"] for score in scores] == [3.0, 3.0, 1.0, 1.0, 2.0, 2.0, 9.0, 2.0, 1.0]


def test_waiting_for_some_leaves_the_groups_of_others_alone():
    """Answers of the next step are scored beside those of this one."""
    with RewardPool([RewardSpec(STRANGE + "rank", per="group")]) as pool:
        first, *rest = [
            pool.submit(Sample("p", f"value {n}", {}, group="later", group_size=3)) for n in (3, 1)
        ]
        now = [pool.submit(Sample("q", f"value {n}", {}, group="now", group_size=2)) for n in (5, 4)]
        assert [score.total for score in pool.gather(now)] == [1.0, 0.0]
        rest.append(pool.submit(Sample("p", "value 2", {}, group="later", group_size=3)))
        assert [score.total for score in pool.gather([first, *rest])] == [2.0, 0.0, 1.0]


def test_others_may_work_while_a_score_is_awaited():
    calls = []

    def work() -> bool:
        calls.append(len(calls))
        return len(calls) < 20  # then nothing is left to be done

    with RewardPool([BY_NAME], timeout=10) as pool:
        ticket = pool.submit(Sample("p", "sleep 0.5", {}))
        assert pool.gather([ticket], work)[0].total == 1.0
    assert len(calls) >= 20


def test_async_functions_wait_together():
    with RewardPool([STRANGE + "waits"], num_workers=1, timeout=2.0, max_failed=1.0) as pool:
        begin = time.monotonic()
        scores = _scores(pool, *["x"] * 100)
        assert time.monotonic() - begin < 20.0, "100 waits of 0.3 s take 30 s one after the other"
        assert [score.total for score in scores] == [1.0] * 100
        mixed = _scores(pool, "x", "hang", "raise", "x")
        assert [s.total for s in mixed] == [1.0, None, None, 1.0]
        assert [s.failures[0].kind for s in mixed[1:3]] == ["timeout", "exception"]
        blocked = _scores(pool, "x", "block", "x", "x")
        assert [s.total for s in blocked] == [1.0, None, 1.0, 1.0], (
            "who blocks the event loop is found and ended"
        )


def test_workers_are_small_and_know_no_torch():
    import torch  # noqa: F401, PLC0415 (the trainer has it loaded; the worker must not)

    with RewardPool([STRANGE + "torch_loaded", STRANGE + "memory_mb", "last_number"]) as pool:
        (score,) = _scores(pool, "1", answer="1")
    assert score.values["torch_loaded"] == 0.0
    assert score.values["memory_mb"] < 40


def test_idle_processes_use_no_cpu(strange):
    pids = [strange._link._process.pid, *_children(strange._link._process.pid)]
    assert len(pids) == 3

    def used() -> int:
        total = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    begin = used()
    time.sleep(1.0)
    assert used() - begin <= 2, "of 100 ticks"


def test_close_leaves_nothing_behind():
    pool = RewardPool([BY_NAME], num_workers=3, timeout=60, max_failed=1.0)
    for completion in ("children", "hang deaf", "value 1"):
        pool.submit(_samples(completion)[0])
    own = _children(pool._link._process.pid)
    assert _eventually(lambda: len(_children(pool._link._process.pid)) >= 5), (
        "the children of the reward have started"
    )
    processes = [pool._link._process.pid, *own, *_children(pool._link._process.pid)]
    pool.close()
    assert not _alive(processes)
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.submit(_samples("value 1")[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_the_trainer_dies_all_die(tmp_path, number):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it\n"
        "from hetero.rl.rewards import RewardPool, Sample\n"
        f"pool = RewardPool([{BY_NAME!r}], num_workers=3, timeout=1000)\n"
        "for text in ('children', 'hang in C', 'hang deaf', 'hang'): pool.submit(Sample('p', text, {}))\n"
        "time.sleep(0.5); print('up', flush=True); time.sleep(1000)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    )
    try:
        assert trainer.stdout.readline() == b"up\n"
        below = _children(trainer.pid)
        assert len(below) >= 6
    finally:
        trainer.send_signal(number)
        trainer.wait()
        trainer.stdout.close()
    assert _eventually(lambda: all(_state(pid) == "Z" for pid in _alive(below)))


def test_a_killed_supervisor_is_replaced_and_loses_no_job():
    with RewardPool([BY_NAME], num_workers=2, timeout=20) as pool:
        tickets = [pool.submit(sample) for sample in _samples(*["sleep 0.4"] * 4, "value 5")]
        first = pool._link._process.pid
        workers = _children(first)
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        assert [score.total for score in pool.gather(tickets)] == [1.0, 1.0, 1.0, 1.0, 5.0]
        assert pool._link._process.pid != first
        assert _eventually(lambda: not [p for p in _alive(workers) if _state(p) != "Z"])
        for _ in range(2):
            os.kill(pool._link._process.pid, signal.SIGKILL)
            assert _scores(pool, "value 6")[0].total == 6.0
        os.kill(pool._link._process.pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="ended 4 times"):
            _scores(pool, "value 7")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_workers_that_are_killed_from_outside_cost_at_most_their_job():
    chance = random.Random(1)
    with RewardPool([BY_NAME, STRANGE + "pid"], num_workers=3, timeout=20, max_failed=1.0) as pool:
        tickets = [pool.submit(sample) for sample in _samples(*["sleep 0.02"] * 100)]
        for _ in range(12):
            time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(_children(pool._link._process.pid)), signal.SIGKILL)
        scores = pool.gather(tickets)
        failures = [failure for score in scores for failure in score.failures]
        assert 1 <= len(failures) <= 12
        assert {failure.message for failure in failures} == {"its process was killed by SIGKILL"}
        assert all(score.values["by_name"] == 1.0 for score in scores if not score.failures)
        assert len({score.values["pid"] for score in scores}) > 3, "new workers took over"
        assert _scores(pool, "value 2")[0].values["by_name"] == 2.0


def test_what_functions_print_can_be_kept(tmp_path):
    log = tmp_path / "rewards.log"
    with RewardPool([BY_NAME], log=log) as pool:
        assert _scores(pool, "print")[0].total == 1.0
    assert log.stat().st_size == 51_000_001


def test_large_columns_and_many_samples_pass():
    with RewardPool([STRANGE + "strict"], num_workers=2) as pool:
        big = "x" * 2_000_000
        tickets = [pool.submit(Sample("p", big, {"answer": big if n % 2 else "no"})) for n in range(40)]
        assert [score.total for score in pool.gather(tickets)] == [float(n % 2) for n in range(40)]


def test_columns_that_cannot_be_sent_are_named():
    with (
        RewardPool(["last_number"]) as pool,
        pytest.raises(RewardError, match="The columns answer, odd cannot be sent"),
    ):
        pool.submit(Sample("p", "c", {"answer": "1", "odd": lambda: 1}))
