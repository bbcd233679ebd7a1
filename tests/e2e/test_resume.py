"""Six steps straight == three, kill -9, resume, three: every file that the clock is not in, to the bit."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from left_behind import STEPS, assert_same, finished_steps, state, wait_for

from hetero import loop
from hetero.errors import CheckpointError


@pytest.fixture
def straight(small: Any, tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "straight"
    loop.run(small.recipe(train={"steps": STEPS}, eval={"every": 2}), out)
    return state(out)


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
