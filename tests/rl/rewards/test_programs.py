"""Rewards that execute code: hidden tests and queries, and no reward from failures of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.data.shell import shell
from hetero.errors import RewardError
from hetero.recipe.recipe import Recipe
from hetero.rl.rewards import RewardPool, RewardSpec, Sample
from hetero.rl.rewards.programs import code_of, python_tests, sql_rows
from hetero.rl.rewards.shell import shell_task
from hetero.run.parts import prepared
from hetero.run.watch import Unwatched
from hetero.sandbox import client
from hetero.sandbox import store as stores
from hetero.sandbox.errors import IsolationUnavailable, SandboxError
from hetero.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    path = tempfile.mkdtemp(prefix="hetero-store-")
    os.chmod(path, 0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_STORE", path)
        client.stop()
        try:
            Sandbox.create().close()
        except IsolationUnavailable as error:
            pytest.skip(f"no sandboxes on this machine: {error}")
        yield
        client.stop()
    shutil.rmtree(path)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that the boxes' user can reach."""
    path = Path(tempfile.mkdtemp(prefix="hetero-open-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert math.isclose(add(.1, .2), .3)"]


def said(code: str) -> str:
    return f"Sure!\n```python\n{code}\n```\nThat is all."


def test_mbpp_rows() -> None:
    replies = [
        said("def add(a, b): return a + b"),
        said("def add(a, b): return 3"),
        said("def add(a, b) return"),
        "I do not know.",
        said("import os; os._exit(0)"),
        [{"role": "assistant", "content": said("def add(a, b):\n    return a + b")}],
    ]
    rewards = python_tests(replies, test_list=[ASSERTS] * 6, test_setup_code=["import math"] * 6)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert python_tests(replies[1:2], test_list=[ASSERTS], test_setup_code=["import math"], partial=True) == [
        pytest.approx(1 / 3)
    ]
    assert python_tests(["x"], test_list=[[]]) == [None]
    with pytest.raises(ValueError, match="test_list"):
        python_tests(["x"])


def test_humaneval_rows() -> None:
    check = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == 9\n"
    replies = [
        said("def square(n): return n * n"),
        said("def square(n): return 4"),
        said("def other(n): return 4"),
    ]
    assert python_tests(replies, test=[check] * 3, entry_point=["square"] * 3) == [1.0, 0.0, 0.0]


def test_sql_rows() -> None:
    schema = "CREATE TABLE t(a INT, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (2, 'z');"
    replies = [
        "```sql\nSELECT b FROM t WHERE a = 2 ORDER BY b DESC\n```",
        "SELECT b FROM t WHERE a > 1",
        "```sql\nSELECT b FROM t\n```",
        "```sql\nDROP TABLE t\n```",
        "nonsense",
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r",
    ]
    unordered = "SELECT b FROM t WHERE a = 2"
    assert sql_rows(replies[:5], [schema] * 5, [unordered] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert sql_rows(replies[:2], [schema] * 2, [unordered + " ORDER BY b"] * 2) == [0.0, 1.0]
    with pytest.raises(ValueError, match="fails over its schema"):
        sql_rows(replies[:1], [schema], ["SELECT nothing FROM nowhere"])


def test_a_broken_sandbox_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Sandbox:
        raise IsolationUnavailable("none here")

    monkeypatch.setattr(Sandbox, "create", broken)
    with pytest.raises(SandboxError):
        python_tests([said("def add(a, b): return a + b")], test_list=[ASSERTS])


def test_the_last_fitting_block_counts() -> None:
    text = "```python\na\n```\n```text\nb\n```\n```py\nc\n```\n```json\n{}\n```"
    assert code_of(text, ("python", "py")) == "c\n"
    assert code_of("```json\n{}\n```", ("python",)) == ""
    assert code_of("plain", ("python",)) == "plain"
    assert code_of("```python\ncut off", ("python",)) == "cut off"


def test_they_run_in_reward_workers() -> None:
    with RewardPool([RewardSpec("python_tests", options={"timeout": 20})], num_workers=1, timeout=90) as pool:
        replies = [said("def add(a, b): return a + b"), said("def add(a, b): return 3")]
        columns = {"test_list": ASSERTS, "test_setup_code": "import math"}
        scores = pool.gather([pool.submit(Sample("p", reply, columns)) for reply in replies])
    assert [score.total for score in scores] == [1.0, 0.0], [score.failures for score in scores]


COLUMNS = {"test_list": ASSERTS, "test_setup_code": "import math"}


def test_a_sandbox_that_breaks_masks_the_sample_and_counts(open_path: Path) -> None:
    """Never 0: neither when boxes can no longer be made, nor when the launcher is killed under one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_STORE", str(open_path / "store"))
        with RewardPool(["python_tests"], timeout=60, max_failed=1.0) as pool:
            ticket = pool.submit(Sample("p", said("while True: pass"), COLUMNS))
            run = Path(str(next((open_path / "store" / "runs").glob("*.lock"))).removesuffix(".lock"))
            while len(list((run / "boxes").iterdir())) < 2:
                time.sleep(0.01)  # the solution's box, and the tests'
            for process in launchers(int(run.name.partition("-")[0])):
                os.kill(process, signal.SIGKILL)
            [killed] = pool.gather([ticket])
            (open_path / "store").rename(open_path / "away")
            (open_path / "store").write_text("no directory")
            [broken] = pool.gather([pool.submit(Sample("p", said("def add(a, b): return a + b"), COLUMNS))])
        (open_path / "store").unlink()
        (open_path / "away").rename(open_path / "store")
        stores.sweep()  # what the killed launcher could not take away
    for score in (killed, broken):
        assert score.total is None
        assert [failure.kind for failure in score.failures] == ["exception"]
        assert "andbox" in score.failures[0].message


def launchers(owner: int) -> list[int]:
    """Children of a reward worker."""
    return [int(pid) for pid in Path(f"/proc/{owner}/task/{owner}/children").read_text().split()]


def test_closed_pools_leave_nothing(open_path: Path) -> None:
    """However a worker ends, by the pool's end or by its own deadline, its launcher tidies up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_STORE", str(open_path))
        with RewardPool(
            [RewardSpec("python_tests", options={"timeout": 50})], timeout=3, max_failed=1.0
        ) as pool:
            [late] = pool.gather([pool.submit(Sample("p", said("while True: pass"), COLUMNS))])
            [again] = pool.gather([pool.submit(Sample("p", said("def add(a, b): return 3"), COLUMNS))])
            owners = {path.name.partition("-")[0] for path in (open_path / "runs").glob("*.lock")}
        assert late.failures[0].kind == "timeout"
        assert again.total == 0.0
        assert len(owners) >= 1
        assert list((open_path / "runs").iterdir()) == []
    root = Path("/sys/fs/cgroup")
    assert not [path for pid in owners for path in root.glob(f"*/hetero-{pid}-*")]


def test_sandboxes_are_ready_before_a_model_is_loaded(
    open_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers run, and a machine without sandboxes is told so, before the model takes time and memory."""

    class Reached(Exception):
        pass

    def load(*_: object, **__: object) -> None:
        raise Reached([path.name for path in (store / "runs").glob("*.lock")])

    store = open_path / "store"
    monkeypatch.setenv("HETERO_STORE", str(store))
    monkeypatch.setattr("hetero.run.parts.opened", load)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "add", **COLUMNS}) + "\n")
    recipe = Recipe.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": str(rows)},
            "rl": {"rewards": ["python_tests"]},
            "train": {"steps": 1},
        }
    )
    with pytest.raises(Reached) as reached, prepared(recipe, tmp_path / "a", resume=False, watch=Unwatched()):
        pass
    assert len(reached.value.args[0]) == 1
    shutil.rmtree(store)
    store.write_text("no directory")
    with (
        pytest.raises(RewardError, match="sandbox store"),
        prepared(recipe, tmp_path / "b", resume=False, watch=Unwatched()),
    ):
        pass


def test_shell_rows() -> None:
    setup = "printf 'a 1\\nb 2\\n' > data.txt"
    check = '[ "$(cat result)" = 2 ]'
    replies = [
        "Like so:\n```bash\nwc -l < data.txt > result\n```",
        "```sh\necho 2 > result\n```",
        "```bash\necho 3 > result\n```",
        "```bash\nexit 0\n```",
        "I cannot.",
        "```bash\n(while true; do echo 2 > result; done) & sleep 0.1; echo 3 > result; kill %1\n```",
        '```bash\necho "exit 0" > /home/agent/.bashrc; export BASH_ENV=/home/agent/.bashrc\n```',
    ]
    count = len(replies)
    assert shell_task(replies, setup=[setup] * count, check=[check] * count) == [1, 1, 0, 0, 0, 0, 0]
    assert shell_task(["x"], check=[""]) == [None]
    with pytest.raises(ValueError, match="column check"):
        shell_task(["x"])
    with pytest.raises(ValueError, match="setup fails"):
        shell_task(["x"], setup=["false"], check=[check])


def test_shell_rows_whose_programs_are_run() -> None:
    runs = [
        {"command": "./double.sh", "stdin": "4\n", "stdout": "8\n"},
        {"command": "./double.sh", "stdin": "5\n", "stdout": "10"},
        {"command": "./double.sh", "stdin": "", "exit": 3},
    ]
    script = (
        "cat > double.sh <<'END'\n#!/bin/bash\nread n || exit 3\necho $((2 * n))\nEND\nchmod +x double.sh"
    )
    fake = "printf '#!/bin/bash\\necho 8; exit 0\\n' > double.sh; chmod +x double.sh"
    killer = "printf '#!/bin/bash\\nkill -9 $PPID -1\\n' > double.sh; chmod +x double.sh"
    replies = [f"```bash\n{each}\n```" for each in (script, fake, killer)]
    assert shell_task(replies, runs=[runs] * 3) == [1.0, 0.0, 0.0]
    assert shell_task(replies, runs=[runs] * 3, partial=True) == [1.0, pytest.approx(1 / 3), 0.0]


def test_a_shell_task_is_tried_out_on_its_own_solution() -> None:
    row = {"setup": ["touch x"], "check": ["[ -e y ]"]}
    assert shell_task(["```bash\ntouch y\n```"], **row, solution=["touch y"]) == [1.0]
    with pytest.raises(ValueError, match="own solution"):
        shell_task(["```bash\ntouch y\n```"], **row, solution=["touch z"])
    with pytest.raises(ValueError, match="nothing is done"):
        shell_task(["```bash\ntouch y\n```"], check=["true"], solution=["true"])


def test_every_row_of_the_shell_data_is_a_task() -> None:
    for split in ("train", "held_out"):
        rows = shell(split, num_tasks=4)
        assert {row["kind"] for row in rows} == {"count", "sort", "pick", "sum", "last"}
        columns = {name: [row[name] for row in rows[:5]] for name in ("setup", "check", "solution")}
        replies = [f"```bash\n{row['solution']}\n```" for row in rows[:5]]
        assert shell_task(replies, **columns) == [1.0] * 5


def test_shell_rewards_run_in_reward_workers_and_broken_boxes_mask(open_path: Path) -> None:
    columns = {"setup": "touch x", "check": "[ -e y ]"}
    with RewardPool([RewardSpec("shell_task", options={"timeout": 20})], num_workers=1, timeout=90) as pool:
        replies = ["```bash\ntouch y\n```", "```bash\ntrue\n```"]
        scores = pool.gather([pool.submit(Sample("p", reply, columns)) for reply in replies])
    assert [score.total for score in scores] == [1.0, 0.0], [score.failures for score in scores]
