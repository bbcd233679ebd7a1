"""Block files: whole or not there, whatever happens to the process, the disk or the bytes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero.engine.tiers import directory as module
from hetero.engine.tiers.block_file import HEADER_BYTES, BlockName, root_of
from hetero.engine.tiers.directory import BlockDirectory
from hetero.errors import CapacityError, UnavailableError

BYTES = 4096
ROOT = root_of({"weights": "some", "instruction set": "any"})


def name(i: int, root: bytes = ROOT) -> BlockName:
    return BlockName(root, i.to_bytes(16, "big"))


def payload(i: int, size: int = BYTES) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, size, np.uint8)


def make(path: Path, num_blocks: int = 100) -> BlockDirectory:
    return BlockDirectory(path, budget=num_blocks * (BYTES + HEADER_BYTES), bytes_per_block=BYTES)


def load(directory: BlockDirectory, which: BlockName) -> np.ndarray | bool | None:
    out = np.zeros(BYTES, np.uint8)
    found = directory.load(which, out)
    return out if found else found


def test_what_was_stored_is_found_by_every_process_that_looks(tmp_path: Path) -> None:
    one, two = make(tmp_path), make(tmp_path)
    assert load(one, name(1)) is None
    assert one.store(name(1), payload(1))
    assert not two.store(name(1), payload(1)), "it is there"
    assert np.array_equal(load(two, name(1)), payload(1))
    assert load(two, name(1, root_of({"weights": "others"}))) is None
    assert load(two, name(2)) is None
    assert (tmp_path / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def damages() -> Iterator[tuple[str, object]]:
    """Every byte of the header, bytes all over the payload, and other lengths."""
    rng, size = random.Random(0), HEADER_BYTES + BYTES
    for at in [*range(HEADER_BYTES), *(rng.randrange(HEADER_BYTES, size) for _ in range(100)), size - 1]:
        for bit in (0, 7):

            def flip(data: bytearray, at: int = at, bit: int = bit) -> bytes:
                data[at] ^= 1 << bit
                return bytes(data)

            yield f"bit {bit} of byte {at}", flip
    for length in [0, 1, HEADER_BYTES - 1, HEADER_BYTES, *(rng.randrange(size) for _ in range(30)), size - 1]:
        yield f"cut to {length}", lambda data, length=length: bytes(data[:length])
        yield f"zeros from {length}", lambda data, length=length: bytes(data[:length]) + bytes(size - length)
    yield "longer", lambda data: bytes(data) + b"\0"
    yield "garbage", lambda data: rng.randbytes(size)


def test_no_damage_is_ever_served_and_the_file_goes(tmp_path: Path) -> None:
    directory = make(tmp_path)
    data = payload(1)
    data[-1] |= 1  # so that zeros to the end are a change, too
    for what, damage in damages():
        directory.store(name(1), data)
        file = directory.file(name(1))
        file.write_bytes(damage(bytearray(file.read_bytes())))
        assert load(directory, name(1)) is False, what
        assert not file.exists(), what
        assert directory.store(name(1), data), what
        assert np.array_equal(load(directory, name(1)), data), what
        file.unlink()


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    """Of other tokens, of other weights: names are part of what the checksum covers."""
    directory = make(tmp_path)
    other = root_of({"weights": "others"})
    for wrong in (name(2), name(1, other)):
        directory.store(name(1), payload(1))
        directory.file(wrong).parent.mkdir(exist_ok=True)
        os.rename(directory.file(name(1)), directory.file(wrong))
        assert load(directory, wrong) is False


def test_a_block_of_another_size_is_refused(tmp_path: Path) -> None:
    BlockDirectory(tmp_path, budget=1 << 20, bytes_per_block=BYTES // 2).store(
        name(1), payload(1, BYTES // 2)
    )
    assert load(make(tmp_path), name(1)) is False


def test_the_budget_holds_and_the_blocks_used_last_stay(tmp_path: Path) -> None:
    directory = make(tmp_path, num_blocks=10)
    (tmp_path / "mine.txt").write_text("not a block")
    for i in range(30):
        directory.store(name(i), payload(i))
        os.utime(directory.file(name(i)), (i, i))
        assert load(directory, name(0)) is not None, "it is used all the time"
        assert sum(f.stat().st_size for f in tmp_path.rglob("*.kv")) <= 10 * (BYTES + HEADER_BYTES)
    left = [i for i in range(30) if load(directory, name(i)) is not None]
    assert left[0] == 0
    assert left[-1] == 29
    assert 8 <= len(left) <= 10
    assert left[1:] == list(range(30 - len(left) + 1, 30))
    assert (tmp_path / "mine.txt").read_text() == "not a block"


def test_what_other_processes_write_counts(tmp_path: Path) -> None:
    one, two = make(tmp_path, num_blocks=16), make(tmp_path, num_blocks=16)
    for i in range(100):
        (one, two)[i % 2].store(name(i), payload(i))
        assert (
            len(list(tmp_path.rglob("*.kv"))) <= 16 + 2 * 2
        )  # each looks again after an eighth of the budget


def test_unfinished_files_of_the_dead_are_removed_those_of_the_living_not(tmp_path: Path) -> None:
    directory = make(tmp_path)
    directory.store(name(1), payload(1))
    folder = directory.file(name(1)).parent
    old, young = folder / ".a.1.1.tmp", folder / ".b.1.1.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    directory.trim()
    assert (old.exists(), young.exists()) == (False, True)


def test_a_full_disk_is_an_error_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path)

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        directory.store(name(1), payload(1))
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".kv", ".tmp")]


def test_threads_and_trimming_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two writers over one small budget, and a reader: whole blocks or none."""
    stop, bad = threading.Event(), []

    def write(seed: int) -> None:
        directory, rng = make(tmp_path, num_blocks=6), random.Random(seed)
        while not stop.is_set():
            i = rng.randrange(20)
            directory.store(name(i), payload(i))

    writers = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    reader, served, ends = make(tmp_path), 0, time.monotonic() + 1.0
    while time.monotonic() < ends:
        for i in range(20):
            found = load(reader, name(i))
            served += found is not None
            if found is False or (found is not None and not np.array_equal(found, payload(i))):
                bad.append(i)
    stop.set()
    for writer in writers:
        writer.join()
    assert served > 20
    assert bad == []


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_disk_size is 5 bytes; one block of this model takes 4160"):
        BlockDirectory(tmp_path, budget=5, bytes_per_block=BYTES)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"cannot be used: .*Name a directory that can be written"):
        make(tmp_path / "file" / "below")


def kill(script: str, path: Path, rounds: int) -> dict[str, int]:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / script), str(path), str(rounds), "1"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here.parent)])},
    )
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(script, result)
    assert result["rounds"] == rounds
    return result


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_writers_killed_at_random_moments_leave_no_wrong_bytes(tmp_path: Path, rounds: int) -> None:
    result = kill("kill_writers.py", tmp_path, rounds)
    assert result["wrong"] == result["refused"] == 0
    assert result["served"] > 5 * rounds


@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_engines_killed_at_random_moments_mislead_no_other(tmp_path: Path, rounds: int) -> None:
    result = kill("kill_engines.py", tmp_path, rounds)
    assert result["wrong"] == result["refused"] == 0
    assert result["served"] > 100 * rounds
