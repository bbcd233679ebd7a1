"""No process may be left when a run is killed."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hetero.doctor.finding import Finding, judge
from hetero.run.child import IMPORT_ROOT

OWNER = [sys.executable, "-m", "hetero.doctor.pool_owner"]
STARTUP, PATIENCE = 30.0, 5.0
"""Seconds that the owner of the workers may take to start, and its workers to end when it is killed."""


def check_processes() -> Iterator[Finding]:
    """Kill -9 a process with busy reward workers; they and what they started must go."""
    with subprocess.Popen(OWNER, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=IMPORT_ROOT) as owner:
        try:
            below = _started(owner)
        finally:
            owner.kill()
    if not below:
        yield Finding(
            "processes/start",
            False,
            "reward workers did not start",
            "Run `python -m hetero.doctor.pool_owner`, which should print 'ready', to see why.",
        )
        return
    end = time.monotonic() + PATIENCE
    while (left := [pid for pid in below if _lives(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    yield judge(
        "processes/kill",
        not left,
        f"{len(left)} of {len(below)} processes left after kill -9",
        f"Reward processes outlive a killed run here; end them: kill -9 {' '.join(map(str, left))}. "
        "A container needs an init process (docker run --init), and /proc must be mounted.",
    )


def _started(owner: subprocess.Popen[bytes]) -> list[int]:
    """The processes below the owner once they are all busy; none when they do not come."""
    assert owner.stdout is not None
    if not select.select([owner.stdout], [], [], STARTUP)[0]:
        return []
    words = owner.stdout.readline().split()
    return [int(word) for word in words[1:]] if words[:1] == [b"ready"] else []


def _lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
