"""Six steps straight == three, kill -9, resume, three: every file that the clock is not in, to the bit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero import loop
from hetero.errors import CheckpointError
from hetero.run.metrics import WALL_TIME

STEPS = 6


def journal(path: Path) -> list[dict[str, Any]]:
    """All lines without what depends on the clock."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(WALL_TIME)} for record in records]


def state(out: Path) -> dict[str, Any]:
    """Everything that a finished run leaves behind and that must not depend on how it came there."""
    newest = out / "checkpoints" / f"step-{STEPS}"
    files = [*newest.rglob("*.safetensors"), *(out / "adapter").rglob("*.safetensors")]
    assert len(files) >= 3
    found: dict[str, Any] = {str(path.relative_to(out)): path.read_bytes() for path in files}
    for path in newest.rglob("*.json"):
        if path.name != "manifest.json":
            found[str(path.relative_to(out))] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("metrics", "completions", "eval"):
        found[name] = journal(out / f"{name}.jsonl")
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name] == other[name], name


@pytest.fixture
def straight(small: Any, tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "straight"
    loop.run(small.recipe(train={"steps": STEPS}, eval={"every": 2}), out)
    return state(out)


def finished_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process: subprocess.Popen[str], until: Callable[[], bool], limit: float = 400.0) -> None:
    end = time.monotonic() + limit
    while process.poll() is None and not until():
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.005)


def test_killed_after_three_steps(small: Any, straight: dict[str, Any], hetero: Any, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    recipe = small.file(train={"steps": STEPS}, eval={"every": 2})
    process = hetero("rl", recipe, "--out", out)
    wait_for(process, lambda: finished_steps(out) >= 3)
    process.kill()
    process.communicate()
    assert 3 <= finished_steps(out) < STEPS
    process = hetero("rl", recipe, "--out", out, "--resume")
    said, wrong = process.communicate(timeout=300)
    assert process.returncode == 0, wrong
    assert "hetero chat" in said
    assert_same(state(out), straight)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_any_time(
    seed: int, small: Any, straight: dict[str, Any], hetero: Any, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    dice = random.Random(seed)
    recipe = small.file(train={"steps": STEPS}, eval={"every": 2})
    for _ in range(8):
        process = hetero("rl", recipe, "--out", out, "--resume")
        target = finished_steps(out) + dice.randrange(2)
        wait_for(process, lambda target=target: finished_steps(out) >= target)  # type: ignore[misc]
        time.sleep(dice.random() * 0.5)
        process.kill()
        process.communicate()
    process = hetero("rl", recipe, "--out", out, "--resume")
    _, wrong = process.communicate(timeout=300)
    assert process.returncode == 0, wrong
    assert_same(state(out), straight)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_asked_to_stop(
    number: signal.Signals, status: int, small: Any, straight: dict[str, Any], hetero: Any, tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    recipe = small.file(train={"steps": STEPS, "save_every": 4}, eval={"every": 2})
    process = hetero("rl", recipe, "--out", out)
    wait_for(process, lambda: finished_steps(out) >= 2)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    done = finished_steps(out)
    assert process.returncode == status, said
    assert "--resume" in said
    assert 2 <= done < STEPS
    assert (out / "checkpoints" / f"step-{done}").is_dir(), "what was finished is saved"
    assert (out / "adapter" / "adapter_config.json").is_file()
    loop.run(small.recipe(train={"steps": STEPS}, eval={"every": 2}), out, resume=True)
    assert_same(state(out), straight)


def test_more_steps_may_follow_a_finished_run(small: Any, straight: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "longer"
    loop.run(small.recipe(train={"steps": 4}, eval={"every": 2}), out)
    loop.run(small.recipe(train={"steps": STEPS}, eval={"every": 2}), out, resume=True)
    assert_same(state(out), straight)
    assert loop.run(small.recipe(train={"steps": STEPS}, eval={"every": 2}), out, resume=True) == STEPS
    assert_same(state(out), straight)


def test_an_existing_directory_is_not_overwritten(small: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    loop.run(small.recipe(), out)
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="--resume"):
        loop.run(small.recipe(), out)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_changed_recipe_is_not_resumed(small: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    loop.run(small.recipe(), out)
    with pytest.raises(CheckpointError) as caught:
        loop.run(small.recipe(train={"lr": 0.5}, rl={"max_tokens": 9}), out, resume=True)
    assert "train.lr: 0.01 -> 0.5" in str(caught.value)
    assert "rl.max_tokens: 8 -> 9" in str(caught.value)


def test_a_directory_of_something_else_is_left_alone(small: Any, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    for resume in (False, True):
        with pytest.raises(CheckpointError):
            loop.run(small.recipe(), tmp_path / "photos", resume=resume)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
