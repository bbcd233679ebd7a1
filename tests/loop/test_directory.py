"""The run directory: one holder, one recipe, checkpoints that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import CheckpointError
from hetero.recipe.recipe import Recipe
from hetero.run.directory import RunDirectory


def recipe(**train: object) -> Recipe:
    return Recipe.from_dict(
        {
            "model": {"path": "x"},
            "data": {"train": "arithmetic"},
            "rl": {"rewards": ["last_number"]},
            "train": {"steps": 9, **train},
        }
    )


def write(directory: Path) -> None:
    directory.mkdir()
    (directory / "weights").write_bytes(b"1")


def test_two_processes_cannot_hold_it(tmp_path: Path) -> None:
    first = RunDirectory.open(tmp_path / "run", recipe(), resume=False)
    with pytest.raises(CheckpointError, match="Another process"):
        RunDirectory.open(tmp_path / "run", recipe(), resume=True)
    first.close()
    RunDirectory.open(tmp_path / "run", recipe(), resume=True).close()


def test_a_refused_recipe_leaves_it_free(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", recipe(), resume=False).close()
    with pytest.raises(CheckpointError, match=r"train\.seed: 0 -> 1"):
        RunDirectory.open(tmp_path / "run", recipe(seed=1), resume=True)
    RunDirectory.open(tmp_path / "run", recipe(), resume=True).close()


def test_checkpoints_are_kept_found_and_rewound_to(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path / "run", recipe(), resume=False)
    assert run.saved == 0
    for step in (1, 2, 3, 10):
        run.metrics.write([{"step": step}])
        run.save(step, write, {"order": {"serial": step}}, keep=2)
    run.metrics.write([{"step": 11}])
    run.close()
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step-10", "step-3"]
    again = RunDirectory.open(tmp_path / "run", recipe(), resume=True)
    assert again.saved == 10
    assert again.state(10)["order"] == {"serial": 10}
    assert (again.trainer(10) / "weights").read_bytes() == b"1"
    assert [record["step"] for record in again.metrics.read()] == [1, 2, 3, 10]
    again.close()


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path / "run", recipe(), resume=False)
    run.save(1, write, {}, keep=2)
    run.save(2, write, {}, keep=2)
    run.close()
    (run.trainer(2) / "weights").write_bytes(b"2")
    with pytest.warns(UserWarning, match="weights"):
        again = RunDirectory.open(tmp_path / "run", recipe(), resume=True)
    assert again.saved == 1
    again.close()


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path / "run", recipe(), resume=False)
    run.save(1, write, {}, keep=1)

    def fail(directory: Path) -> None:
        write(directory)
        raise OSError("the disk is full")

    with pytest.raises(CheckpointError, match="disk is full"):
        run.save(2, fail, {}, keep=1)
    run.close()
    again = RunDirectory.open(tmp_path / "run", recipe(), resume=True)
    assert again.saved == 1
    again.close()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        RunDirectory.open(tmp_path / "run", recipe(), resume=False)


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(CheckpointError, match="cannot be written"):
            RunDirectory.open(place, recipe(), resume=False)


def test_nobody_is_told_to_delete_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match="no run directory") as caught:
        RunDirectory.open(tmp_path, recipe(), resume=False)
    assert "rm -r" not in str(caught.value)
    run = tmp_path / "my run"
    RunDirectory.open(run, recipe(), resume=False).close()
    with pytest.raises(CheckpointError, match=r"rm -r '.*/my run'"):
        RunDirectory.open(run, recipe(), resume=False)
