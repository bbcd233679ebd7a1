"""What runs leave behind, and waiting for them: shared by the tests of resuming."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.run.metrics import WALL_TIME

STEPS = 6


def journal(path: Path) -> list[dict[str, Any]]:
    """All lines without what depends on the clock."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(WALL_TIME)} for record in records]


def state(out: Path) -> dict[str, Any]:
    """Everything that a finished run leaves behind and that must not depend on how it came there."""
    newest = out / "checkpoints" / f"step-{STEPS}"
    files = [*newest.rglob("*.safetensors"), *(out / "adapter").rglob("*.safetensors")]
    assert len(files) >= 3
    found: dict[str, Any] = {str(path.relative_to(out)): path.read_bytes() for path in files}
    for path in newest.rglob("*.json"):
        if path.name != "manifest.json":
            found[str(path.relative_to(out))] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("metrics", "completions", "eval"):
        found[name] = journal(out / f"{name}.jsonl")
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name] == other[name], name


def finished_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process: subprocess.Popen[str], until: Callable[[], bool], limit: float = 400.0) -> None:
    end = time.monotonic() + limit
    while process.poll() is None and not until():
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.005)
