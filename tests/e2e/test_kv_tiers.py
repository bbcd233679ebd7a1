"""A run with RAM and disk below the KV cache is the run without, also when files of an earlier one help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetero import loop


def test_tiers_change_nothing_that_is_learnt(small: Any, tmp_path: Path) -> None:
    def run(name: str, **engine: str) -> list[dict[str, Any]]:
        loop.run(small.recipe(train={"steps": 3}, engine=engine), tmp_path / name)
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    small.write_data([f"word {letter} " + 60 * letter for letter in "abcdefgh"])
    plain = run("plain")
    tiers = {"kv_ram": "1MiB", "kv_disk": str(tmp_path / "kv"), "kv_disk_size": "4MiB"}
    first, second = run("first", **tiers), run("second", **tiers)
    for found in (first, second):
        assert [comparable(r) for r in found] == [comparable(r) for r in plain]
        assert all(r["kv/stale_refused"] == r["kv/disk_refused"] == r["kv/disk_errors"] == 0 for r in found)
    assert sum(r["kv/disk_written"] for r in first) > 0
    assert sum(r["kv/disk_found"] for r in second) > 0
    assert sum(r["kv/disk_written"] for r in second) == 0, "all of it was there"


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not k.startswith(("time/", "perf/", "kv/"))}
