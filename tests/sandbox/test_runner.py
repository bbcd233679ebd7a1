"""Commands of the tiers without a launcher: whoever is killed, and when, nothing of them is left."""

from __future__ import annotations

import contextlib
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
from hetero.sandbox.launcher import brand, landlock
from hetero.sandbox.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="Landlock is older than ABI 6")

HOSTILE = """
import ctypes, os, resource, signal, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0)  # no signal at the parent's death
for resource_number in (10, 4):
    try:
        resource.setrlimit(resource_number, (7, 7))
    except (OSError, ValueError):
        pass
for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
def apart(body):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for handle in (0, 1, 2):
                os.close(handle)
            body()
        os._exit(0)
def chain():  # a new process all the time; no look at a list of processes finds the one that lives
    while True:
        with open("alive", "a") as file:
            file.write("x")
        if os.fork():
            os._exit(0)
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
for body in (lambda: time.sleep(600), chain, stopped):
    apart(body)
print("begun", flush=True)
time.sleep(600)
"""
OWNER = f"""
import sys, time
from hetero.sandbox import Sandbox
box = Sandbox.create(tier="landlock", min_isolation="landlock")
print(box.id, box._directory, flush=True)
process = box.exec(["python3", "-c", {HOSTILE!r}], background=True, timeout=None)
for _ in process:
    pass
"""


def make() -> Sandbox:
    return Sandbox.create(tier="landlock", min_isolation="landlock")


def runners(box: str) -> tuple[list[int], list[int]]:
    """(guardians, runners) of a box."""
    found = {}
    for pid in brand.bearers({box}):
        with contextlib.suppress(OSError):
            if b"hetero.sandbox.runner.start" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid in found if found[pid] not in found], [pid for pid in found if found[pid] in found]


def is_still(path: Path) -> bool:
    """Whether a file that a living process would lengthen keeps its length."""
    sizes = []
    for _ in range(2):
        sizes.append(path.stat().st_size if path.exists() else -1)
        time.sleep(0.3)
    return sizes[0] == sizes[1]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 40
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def begun(box: Sandbox) -> object:
    """The hostile program, running."""
    process = box.exec(["python3", "-c", HOSTILE], background=True, timeout=None)
    assert next(iter(process)) == ("stdout", b"begun\n")
    wait_until(Path(box.inner_path("/workspace/alive")).exists, "the program does not work")
    return process


def test_the_hostile_program_is_one(tmp_path: Path) -> None:
    """Without a box it outlives its parent: the tests below can fail."""
    code = f"import os; os.chdir({str(tmp_path)!r})\n{HOSTILE}"
    found = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "begun\n"
    wait_until((tmp_path / "alive").exists, "the program does not work")
    found.kill()
    found.wait()
    assert not is_still(tmp_path / "alive")
    (tmp_path / "alive").unlink()
    (tmp_path / "alive").mkdir()  # and that ends the chain
    left = ["pgrep", "-f", str(tmp_path)]
    while pids := subprocess.run(left, capture_output=True, text=True, check=False).stdout.split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["runner", "guardian", "both", "nobody"])
def test_a_killed_runner_takes_its_command_along(victim: str) -> None:
    with make() as box:
        alive = Path(box.inner_path("/workspace/alive"))
        process = begun(box)
        (guardian,), (runner,) = runners(box.id)
        chosen = {"runner": [runner], "guardian": [guardian], "both": [guardian, runner], "nobody": []}
        for pid in chosen[victim]:
            os.kill(pid, signal.SIGKILL)
        if victim in ("nobody", "both"):
            box.pause("hibernate")  # ends all, and keeps the files
            alive = Path(box._layers[0], "workspace/alive")
        else:
            wait_until(lambda: not brand.bearers({box.id}), "processes outlive their runner")
        assert brand.bearers({box.id}) == []
        assert is_still(alive)
        if victim in ("runner", "both"):
            with pytest.raises(Exception, match=r"runner|worker"):
                process.wait()  # type: ignore[attr-defined]


def kill_owner(store: Path, seed: int) -> None:
    """SIGKILL an owner and perhaps its guardian and runner at a random moment; a sweep finds what is left."""
    chance = random.Random(seed)
    env = {**os.environ, "HETERO_STORE": str(store), "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=env, text=True)
    assert owner.stdout is not None
    box, directory = owner.stdout.readline().split()
    time.sleep(chance.random() * 0.5)
    guardians, found = runners(box)
    victims = [pid for pid in (*guardians, *found) if chance.random() < 0.6]
    for pid in (*victims, owner.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()

    def gone() -> bool:
        stores.sweep()
        return not brand.bearers({box}) and not Path(directory).exists()

    wait_until(gone, f"seed {seed}: processes or directories outlive their owner")


@pytest.mark.parametrize("seed", range(4))
def test_nothing_outlives_an_owner(store: Path, seed: int) -> None:
    kill_owner(store, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_outlives_two_hundred_owners(store: Path) -> None:
    for seed in range(1000, 1200):
        kill_owner(store, seed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_for_the_owner_s_group_are_not_the_runner_s(number: int) -> None:
    with make() as box:
        process = box.exec("echo begun; sleep 600", background=True)
        assert next(iter(process)) == ("stdout", b"begun\n")
        (guardian,), (runner,) = runners(box.id)
        assert os.getpgid(guardian) != os.getpgid(0)
        for pid in (guardian, runner):
            os.kill(pid, number)
        time.sleep(0.2)
        assert process.running
        process.kill()
        assert process.wait().reason == "killed"


def test_the_mark_cannot_be_taken_off() -> None:
    with make() as box:
        code = (
            "import resource as r; r.setrlimit(10, (1, 1)); r.prlimit(0, 10, (2, 2)); print(r.getrlimit(10))"
        )
        mark = (1 << 48) | int(box.id, 16)
        assert box.exec(["python3", "-c", code]).stdout == f"({mark}, {mark})\n"
    bare = "import resource as r; r.setrlimit(10, (1, 1)); print(r.getrlimit(10))"
    found = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, check=True)
    assert found.stdout == "(1, 1)\n"
