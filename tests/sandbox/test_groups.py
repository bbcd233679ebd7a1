"""Control groups, v1 and v2: commands are in their box's groups, see no path of them, and leave none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.sandbox import client
from hetero.sandbox.client import CGROUPS, Launcher
from hetero.sandbox.launcher.groups import Groups
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox

UNIFIED = next((p for p in (CGROUPS, f"{CGROUPS}/unified") if os.path.exists(f"{p}/cgroup.controllers")), "")


def parents(root: str) -> list[Path]:
    """Groups of launchers under one root."""
    name = f"hetero-{client.launcher().run.path.name}"
    return [path for pattern in (name, f"*/{name}") for path in Path(root).glob(pattern)]


@pytest.fixture(params=[CGROUPS, UNIFIED, ""], ids=["usual", "v2", "none"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """A launcher that makes its groups there."""
    if request.param and os.geteuid() != 0:
        pytest.skip("only root may make groups")
    if not request.param and request.node.callspec.id == "v2":
        pytest.skip("there is no v2 hierarchy")
    client.stop()
    client._own._current = Launcher(cgroups=request.param)
    yield request.param
    left = parents(request.param) if request.param else []
    client.stop()
    assert not [path for path in left if path.exists()]


def test_a_command_and_its_children_are_in_the_groups_of_the_box(root: str) -> None:
    with Sandbox.create() as box:
        process = box.exec("sleep 30 & echo begun; read line; true", background=True, stdin=b"")
        assert next(iter(process)) == ("stdout", b"begun\n")
        found = [path / box.id for path in (parents(root) if root else [])]
        assert bool(found) == bool(root)
        for path in found:
            while len(pids(path)) < 3:  # their init comes by itself
                time.sleep(0.01)
            members = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids(path)}
            assert {"bash", "sandbox-init"} <= members
            assert len(pids(path)) == 3  # and their init
        process.kill()
        process.wait()
        assert [pids(path) for path in found] == [[]] * len(found)
    assert not [path for path in found if path.exists()]


def pids(group: Path) -> list[int]:
    """Processes in a group."""
    return [int(row) for row in (group / "cgroup.procs").read_text().split()]


def test_a_single_process_is_enough_for_a_command(root: str, make_box: Callable[..., Sandbox]) -> None:
    box = make_box(policy=Policy(limits=Limits(pids=1)))
    assert box.exec(["echo", "alone"]).stdout == "alone\n"
    assert "BlockingIOError" in box.exec(["python3", "-c", "import os; os.fork()"]).stderr


def test_no_group_s_path_is_seen_inside(root: str) -> None:
    with Sandbox.create() as box:
        seen = box.exec("cat /proc/self/cgroup /proc/1/cgroup").stdout.split()
        assert seen
        for row in seen:
            path = row.split(":", 2)[2]
            assert "hetero" not in path
            assert box.id not in path
            if root and root != CGROUPS and row.startswith("0::"):
                assert path == "/"


def test_the_launcher_s_own_groups_end_with_it(root: str) -> None:
    owner = client.launcher()
    Sandbox.create().close()
    left = parents(root) if root else []
    assert bool(left) == bool(root)
    owner.close()
    assert not [path for path in left if path.exists()]


def test_all_boxes_weigh_as_much_as_one_process_of_their_niceness(make_box: Callable[..., Sandbox]) -> None:
    def weight(path: Path) -> float:
        for name, usual in (("cpu.weight", 100), ("cpu.shares", 1024)):
            if (path / name).exists():
                return int((path / name).read_text()) / usual
        return 0

    make_box().close()
    [parent] = [path for path in parents(CGROUPS) if weight(path)] or [None]
    if parent is None:
        pytest.skip("no control group of the CPU here")
    idle = make_box(policy=Policy(limits=Limits(nice=15)))
    assert weight(parent / idle.id) == pytest.approx(1.25**-15, rel=0.2)
    assert weight(parent) == pytest.approx(1.25**-15, rel=0.2)
    usual = make_box()
    assert weight(parent / usual.id) == weight(parent) == pytest.approx(1.25**-5, rel=0.1)
    usual.close()
    assert weight(parent) == pytest.approx(1.25**-15, rel=0.2)


def test_niceness_decides_beside_a_busy_process(make_box: Callable[..., Sandbox]) -> None:
    """On one core, beside a process that always wants it, a box gets the share that its niceness says."""
    make_box()
    if not any((path / "cpu.shares").exists() or (path / "cpu.weight").exists() for path in parents(CGROUPS)):
        pytest.skip("no control group of the CPU here")
    core = min(os.sched_getaffinity(0))
    spin = f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nend = time.time() + 3\n"
    spin += "while time.time() < end: pass\n"
    busy = subprocess.Popen([sys.executable, "-c", spin])
    try:
        found = make_box("seccomp").exec(["python3", "-c", spin], timeout=60)  # which fixes the core
    finally:
        busy.wait()
    assert found.ok, found
    assert found.cpu_s < 0.35 * 3  # half of it without a weight


def test_limits_of_memory_and_processes_are_set(box: Sandbox, make_box: Callable[..., Sandbox]) -> None:
    if box.isolation.tier != "ns+cgroup":
        pytest.skip("no control groups here")
    limited = make_box(policy=Policy(limits=Limits(memory_mb=64, pids=33, cpus=0.5)))
    wanted = {
        "memory.max": str(64 << 20),
        "memory.limit_in_bytes": str(64 << 20),
        "pids.max": "34",
        "cpu.max": "50000 100000",
        "cpu.cfs_quota_us": "50000",
    }
    seen = {
        name: (path / limited.id / name).read_text().strip()
        for path in parents(CGROUPS)
        for name in wanted
        if (path / limited.id / name).exists()
    }
    assert len(seen) == 3
    assert seen == {name: wanted[name] for name in seen}


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that look like a v2 hierarchy with all controllers: few machines let a test have one."""
    files = ("cgroup.procs", "cgroup.subtree_control", "memory.max", "memory.swap.max", "memory.events")
    mkdir = os.mkdir

    def fill(path: str) -> None:
        for name in (*files, "pids.max", "cpu.max", "cpu.weight"):
            Path(path, name).touch()

    monkeypatch.setattr("os.mkdir", lambda path, *rest: (mkdir(path, *rest), fill(path)))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.chown", lambda *_: None)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids rdma\n")
    (tmp_path / "cgroup.subtree_control").touch()
    (tmp_path / "cgroup.procs").touch()
    return tmp_path


def test_what_a_v2_hierarchy_is_told(made_up: Path) -> None:
    groups = Groups("hetero-x", str(made_up), (7, 7))
    parent = made_up / "hetero-x"
    assert set(groups.parents) == {"unified", "cpu", "memory", "pids"}
    for path in (made_up, parent):
        assert set((path / "cgroup.subtree_control").read_text().split()) == {"+cpu", "+memory", "+pids"}
    assert (parent / "launcher" / "cgroup.procs").read_text() == "0"  # this process itself
    limits = {"memory": 64 << 20, "pids": 33, "cpus": 0.5, "nice": 10}
    seat = groups.make("box", limits)
    assert seat.birth >= 0
    assert seat.tasks == ()
    os.close(seat.birth)
    told = {path.name: path.read_text() for path in (parent / "box").iterdir() if path.read_text()}
    assert told == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "pids.max": "34",
        "cpu.max": "50000 100000",
        "cpu.weight": "11",
    }
    assert (parent / "cpu.weight").read_text() == "11"
    (parent / "box" / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    assert groups.oom_kills("box") == 3
    groups.make("free", {"memory": None, "pids": None, "cpus": None, "nice": 0})
    told = {path.name: path.read_text() for path in (parent / "free").iterdir() if path.read_text()}
    assert told == {"cpu.weight": "100"}
    assert (parent / "cpu.weight").read_text() == "100"


def test_controllers_that_cannot_be_had_are_left_alone(made_up: Path) -> None:
    (made_up / "cgroup.controllers").write_text("cpuset pids\n")
    groups = Groups("hetero-y", str(made_up), (7, 7))
    assert set(groups.parents) == {"unified", "pids"}
    os.close(groups.make("box", {"memory": 1, "pids": 2, "cpus": 1.0, "nice": 10}).birth)
    told = {path.name: path.read_text() for path in (made_up / "hetero-y/box").iterdir() if path.read_text()}
    assert told == {"pids.max": "3"}
