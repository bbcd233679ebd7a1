"""The worker that is ready before its request: it has nothing of any box, and its death is nobody's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hetero.sandbox.client import Launcher, launcher
from hetero.sandbox.sandbox import Sandbox


def ready(boxes: set[int]) -> list[int]:
    """Children of the launcher that are no box's first process and look like it: waiting for a message."""
    pid = launcher().process.pid
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    name = Path(f"/proc/{pid}/comm").read_text()
    return [each for each in children if each not in boxes and Path(f"/proc/{each}/comm").read_text() == name]


def settled(boxes: set[int]) -> int:
    """Its pid, when commands before have ended."""
    deadline = time.monotonic() + 20
    while len(found := ready(boxes)) != 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found[0]


def first(box: Sandbox) -> int:
    return int(launcher().ask("state", "")["ok"]["boxes"][box.id])


def test_it_serves_the_next_command_and_another_comes(box: Sandbox) -> None:
    before = settled({first(box)})
    worker = box.exec("cat", background=True, stdin=b"")
    box.exec(["true"])
    assert worker.running
    inside = Path(f"/proc/{before}/task/{before}/children").read_text().split()
    assert len(inside) == 2  # the command and its init
    worker.kill()
    worker.wait()
    assert settled({first(box)}) != before


def test_it_holds_nothing(box: Sandbox) -> None:
    worker = settled({first(box)})
    handles = [os.readlink(f"/proc/{worker}/fd/{name}") for name in os.listdir(f"/proc/{worker}/fd")]
    assert len(handles) == 4  # the standard ones, and the line to the launcher
    assert [name for name in handles if "/" in name] == [name for name in handles if name.startswith("/")]
    assert not [name for name in handles if box.id in name or "pidfd" in name]


def test_killed_while_it_waits_it_is_replaced(box: Sandbox) -> None:
    for _ in range(3):
        worker = settled({first(box)})
        os.kill(worker, signal.SIGKILL)
        while Path(f"/proc/{worker}").exists():
            time.sleep(0.01)
        assert box.exec(["echo", "served"]).stdout == "served\n"


def test_killed_before_the_end_it_keeps_nobody_from_ending() -> None:
    mine = Launcher()
    mine.ask("state", "")
    pid = mine.process.pid
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        time.sleep(0.01)
    for child in map(int, children):
        os.kill(child, signal.SIGKILL)
        while Path(f"/proc/{child}").exists():
            time.sleep(0.01)
    mine.close()
    assert mine.process.returncode == 0
    assert not mine.run.path.exists()
