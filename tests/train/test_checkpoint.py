"""Checkpoints: whole or absent, whenever the process dies; damage is found; old ones go."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.errors import CheckpointError
from hetero.train.checkpoint import (
    checkpoints,
    latest_checkpoint,
    prune_checkpoints,
    verify_checkpoint,
    write_checkpoint,
)


def writer(**files: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name, content in files.items():
            path = directory / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    return write


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_written_files_come_back_and_verify(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "deep" / "step-3", writer(a=b"1", sub__b=b"22"))
    assert verify_checkpoint(target) == target
    assert (target / "a").read_bytes() == b"1"
    assert (target / "sub" / "b").read_bytes() == b"22"
    assert names(target.parent) == ["step-3"]


def test_a_failed_write_leaves_nothing_visible(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-1", writer(a=b"1"))

    def fail(directory: Path) -> None:
        (directory / "a").write_bytes(b"half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_checkpoint(tmp_path / "step-2", fail)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    write_checkpoint(tmp_path / "step-2", writer(a=b"2"))
    assert names(tmp_path) == ["step-1", "step-2"]


def test_replacing_keeps_only_the_new_content(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-1", writer(a=b"1", b=b"2"))
    write_checkpoint(tmp_path / "step-1", writer(a=b"3"))
    verify_checkpoint(tmp_path / "step-1")
    assert names(tmp_path / "step-1") == ["a", "manifest.json"]
    assert names(tmp_path) == ["step-1"]


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-1", writer(a=b"1"))
    (tmp_path / "step-1").rename(tmp_path / ".step-1.replaced")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    (tmp_path / "step-1").rename(tmp_path / ".step-1.replaced")
    assert verify_checkpoint(tmp_path / "step-1").is_dir()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_found_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step-{step}", writer(a=bytes(range(256)) * 50))
    victim = tmp_path / "step-2" / ("manifest.json" if damage == "manifest" else "a")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CheckpointError, match="step-2"):
        verify_checkpoint(tmp_path / "step-2")
    with pytest.warns(UserWarning, match="passing over"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_order_is_numeric_and_strangers_are_left_alone(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_checkpoint(tmp_path / f"step-{step}", writer(a=b"x"))
    (tmp_path / "step-best").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-9", "step-10"]
    prune_checkpoints(tmp_path, keep_last=2)
    assert names(tmp_path) == ["step-10", "step-9", "step-best"]
    with pytest.raises(ValueError, match="keep_last"):
        prune_checkpoints(tmp_path, keep_last=0)


def test_nothing_there_is_none_or_an_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        verify_checkpoint(tmp_path / "step-1")


def save_without_end(parent: Path, told: int) -> None:
    """Write checkpoints, from the newest on; the number of each finished one goes to the descriptor."""
    found = checkpoints(parent)
    for step in itertools.count(int(found[-1].name.removeprefix("step-")) if found else 1):
        contents = str(step).encode() * 20000
        write_checkpoint(parent / f"step-{step}", writer(a=contents, b=contents, c=contents))
        prune_checkpoints(parent, keep_last=2)
        os.write(told, f"{step}\n".encode())


def test_kill_at_random_moments_never_loses_the_last_finished_save(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(12):
        told, tell = os.pipe()
        child = os.fork()  # another interpreter would import for seconds before it saves
        if child == 0:
            try:
                save_without_end(tmp_path, tell)
            finally:
                os._exit(1)
        os.close(tell)
        with open(told) as lines:
            finished = int(lines.readline())
            time.sleep(rng.random() * 0.05)
            os.kill(child, signal.SIGKILL)
            finished = max([finished, *map(int, lines)])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        step = int(latest.name.removeprefix("step-"))
        assert step >= finished
        assert (latest / "a").read_bytes() == str(step).encode() * 20000


def test_a_full_disk_is_one_error_and_takes_no_room(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "half").write_bytes(b"x" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-1 cannot be written.*No space.*Make room"):
        write_checkpoint(tmp_path / "step-1", write)
    assert not list(tmp_path.iterdir())
