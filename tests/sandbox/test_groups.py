"""Control groups, v1 and v2: commands are in their box's groups, see no path of them, and leave none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.sandbox import client
from hetero.sandbox.client import CGROUPS, Launcher
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
