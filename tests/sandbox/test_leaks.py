"""Nothing is left, no process, mount, directory or control group: not after many boxes, not after SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.sandbox import store as stores
from hetero.sandbox.client import Launcher, launcher
from hetero.sandbox.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]

OWNER = """
import os, sys, threading
from hetero.sandbox import Sandbox
def work():
    while True:
        box = Sandbox.create()
        process = box.exec("setsid sh -c 'trap \\"\\" TERM HUP; sleep 300' & sleep 300", background=True)
        box.exec("echo x > f; mkdir -m 000 locked")
        with box.snapshot() as sealed:
            for child in sealed.fork(2):
                child.exec(["true"])
                child.close()
        box.close()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
Sandbox.create()
print(os.getpid(), flush=True)
threading.Event().wait()
"""


def descendants(pid: int) -> set[int]:
    """The process's children, their children, and so on."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        here = pending.pop()
        try:
            children = Path(f"/proc/{here}/task/{here}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


def alive(pids: set[int]) -> set[object]:
    """Those of them that still exist and are no zombies."""
    return {pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and not _is_zombie(pid)}


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def groups(owner: int) -> set[object]:
    """Control groups of one process's launchers."""
    name, root = f"hetero-{owner}-*", Path("/sys/fs/cgroup")
    return {str(path) for pattern in (name, f"*/{name}") for path in root.glob(pattern)}


def kill_owner(store: Path, seed: int, what: str = "owner") -> None:
    """Start an owner, SIGKILL it at a random moment, and see everything of it vanish."""
    runs = set((store / "runs").iterdir())
    env = {**os.environ, "HETERO_STORE": str(store), "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.4)
        family = descendants(owner.pid)
        if what == "launcher":
            for child in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 30
    while left := alive(family) | groups(owner.pid) | (set((store / "runs").iterdir()) - runs):
        if what == "launcher" and not alive(family):
            stores.sweep()
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_owner_leaves_nothing(store: Path, seed: int) -> None:
    kill_owner(store, seed)


def test_a_killed_launcher_and_owner_leave_what_a_sweep_removes(store: Path) -> None:
    kill_owner(store, 1, what="launcher")


@pytest.mark.slow
def test_fifty_killed_owners_leave_nothing(store: Path) -> None:
    for seed in range(100, 150):
        kill_owner(store, seed)


def wait_until(holds: Callable[[], bool]) -> None:
    """Look again until it does."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def settled(launcher: int) -> int:
    """How many processes an idle launcher has: a worker that is ready, and warm interpreters."""
    counts = [0]
    while len(counts) < 20 or len(set(counts[-20:])) > 1:
        counts.append(len(descendants(launcher)))
        time.sleep(0.02)
    return counts[-1]


def cycles(count: int) -> None:
    """Make, use and close so many boxes; nothing grows."""
    with Sandbox.create() as box:
        box.exec(["true"])
    found = launcher()
    found.janitor.close()
    idle, mine = settled(found.process.pid), os.listdir("/proc/self/fd")
    theirs = os.listdir(f"/proc/{found.process.pid}/fd")
    mounts = Path("/proc/self/mountinfo").read_text()
    directories = sorted(found.run.path.glob("*/*"))
    for number in range(count):
        with Sandbox.create() as box:
            if number % 10 == 0:
                box.exec("echo x > f")
            if number % 50 == 0:
                for child in box.fork(2):
                    child.close()
    found.janitor.close()
    wait_until(lambda: len(descendants(found.process.pid)) == idle)
    assert os.listdir("/proc/self/fd") == mine
    assert os.listdir(f"/proc/{found.process.pid}/fd") == theirs
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert sorted(found.run.path.glob("*/*")) == directories
    assert not [path for path in groups(os.getpid()) if any(Path(str(path)).glob("*/cgroup.procs"))]


def test_a_hundred_cycles_leave_nothing() -> None:
    cycles(100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_cycles_leave_nothing() -> None:
    cycles(10_000)


@pytest.mark.slow
def test_a_thousand_boxes_live_at_once() -> None:
    boxes = []
    try:
        for _ in range(1000):
            boxes.append(Sandbox.create())
        assert all(
            boxes[index].exec(["echo", str(index)]).stdout == f"{index}\n" for index in range(0, 1000, 97)
        )
    finally:
        for box in boxes:
            box.close()


def test_a_forked_child_of_the_owner_does_not_keep_boxes_alive(store: Path) -> None:
    """Data loaders fork the trainer: the copies must not hold the launcher's lifeline."""
    code = OWNER.replace(
        "threading.Event().wait()", "os.fork() or __import__('time').sleep(20)\nos.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "HETERO_STORE": str(store), "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    owner.wait()
    deadline = time.monotonic() + 15
    while any(path.name.startswith(f"{owner.pid}-") and path.is_dir() for path in (store / "runs").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    owner.stdout.close()


def test_a_launcher_can_be_closed_twice() -> None:
    mine = Launcher()
    mine.close()
    assert not mine.run.path.exists()
