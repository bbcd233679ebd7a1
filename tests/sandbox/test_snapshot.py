"""Snapshots, forks, pauses: the file tree is what it was, and each branch is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.sandbox import snapshot as snapshots
from hetero.sandbox.errors import SandboxDead
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox

Make = Callable[..., Sandbox]


def test_forks_start_equal_and_go_apart(box: Sandbox) -> None:
    box.write_file("shared", "1")
    with box.snapshot() as sealed:
        first, second = sealed.fork(2)
        box.write_file("shared", "source")
        first.write_file("shared", "first")
        assert [b.read_file("shared") for b in (box, first, second)] == [b"source", b"first", b"1"]
        assert first.parent == sealed.id
    grand = second.fork(2)
    assert [b.read_file("shared") for b in grand] == [b"1", b"1"]
    for each in (first, second, *grand):
        each.close()


def test_a_snapshot_outlives_its_source(box: Sandbox) -> None:
    box.write_file("a", "x")
    sealed = box.snapshot()
    box.close()
    [child] = sealed.fork(1)
    sealed.close()
    assert child.read_file("a") == b"x"
    child.close()


def test_deletions_survive_many_layers(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that are removed and made again hide what was below, also after layers were merged."""
    monkeypatch.setattr(snapshots, "MOST_LAYERS", 4)
    assert box.exec("mkdir d; echo 0 > d/old; echo 0 > gone").ok
    box.snapshot().close()
    assert box.exec("rm -r d gone; mkdir d; echo n > d/new; ln -s d link; chmod 700 d").ok
    for turn in range(8):
        box.snapshot().close()
        assert box.exec(f"echo {turn} > turn{turn}; echo {turn} > latest").ok
    listed = box.exec("find . | sort; cat latest; readlink link; stat -c %a d").stdout.split()
    turns = [f"./turn{turn}" for turn in range(8)]
    assert listed == [".", "./d", "./d/new", "./latest", "./link", *turns, "7", "d", "700"]
    assert len(box._layers) <= 4


def test_freeze_stops_the_clock_and_the_writer(box: Sandbox) -> None:
    process = box.exec(
        "i=0; while [ $i -lt 10000 ]; do echo $i >> log; i=$((i+1)); sleep 0.01; done",
        background=True,
        timeout=30,
    )
    while not box.exec("test -s log").ok:
        pass
    box.pause("freeze")
    with pytest.raises(SandboxDead, match="frozen"):
        box.exec("true")
    before = box.read_file("log")
    time.sleep(0.2)
    assert box.read_file("log") == before
    box.resume()
    deadline = time.monotonic() + 10
    while box.read_file("log") == before:
        assert time.monotonic() < deadline
    process.kill()
    process.wait()


def test_hibernation_keeps_files_and_frees_processes(box: Sandbox) -> None:
    box.write_file("kept", "x")
    process = box.exec("echo begun; sleep 60", background=True)
    assert next(iter(process)) == ("stdout", b"begun\n")  # one that has not begun yet finds its box dead
    box.pause("hibernate")
    assert process.wait().reason == "closed"
    pids = box._shared.launcher.ask("state", "")["ok"]["boxes"]
    assert box.id not in pids
    with box.snapshot() as sealed:
        [child] = sealed.fork(1)
        assert child.read_file("kept") == b"x"
        child.close()
    box.resume()
    assert box.read_file("kept") == b"x"


def test_frozen_copy_goes_on_with_the_command(box: Sandbox) -> None:
    process = box.exec("echo begun > f; read line; echo $line > g", background=True, stdin=b"", timeout=30)
    while not box.exec("test -s f").ok:
        pass
    with box.snapshot("frozen_copy") as sealed:
        process.write(b"go\n", end=True)
        assert process.wait().ok
        [child] = sealed.fork(1)
        assert [entry.name for entry in child.list_dir()] == ["f"]
        assert [entry.name for entry in box.list_dir()] == ["f", "g"]
        child.close()


def test_a_box_with_a_hard_disk_limit_can_be_sealed(make_box: Make) -> None:
    box = make_box(policy=Policy(limits=Limits(disk_hard=True, disk_mb=8)))
    assert box.exec("echo 1 > a; mkdir -p d/e; ln -s a b; chmod 000 d/e").ok
    with box.snapshot() as sealed:
        [child] = sealed.fork(1)
        assert child.exec("cat b; stat -c %a d/e").stdout == "1\n0\n"
        assert child.exec("head -c 16M /dev/zero > big").exit != 0
        child.close()
    assert box.exec("cat a").stdout == "1\n"


def test_boxes_are_made_from_many_threads(make_box: Make) -> None:
    results: list[str] = []

    def work(number: int) -> None:
        with Sandbox.create() as mine:
            mine.write_file("n", str(number))
            [child] = mine.fork(1)
            results.append(child.exec("cat n").stdout)
            child.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [str(number) for number in range(8)]


def test_nothing_is_left_of_closed_boxes(box: Sandbox) -> None:
    run = box._shared.launcher.run.path
    before = set((run / "layers").iterdir())
    box.exec("mkdir -p locked/in; touch locked/in/f; chmod 000 locked")
    sealed = box.snapshot()
    children = sealed.fork(3)
    for each in (*children, box):
        each.close()
    assert set((run / "layers").iterdir()) > before
    sealed.close()
    assert set((run / "layers").iterdir()) == before
    assert not any(path.name.startswith(box.id) for path in Path(run / "boxes").iterdir())
