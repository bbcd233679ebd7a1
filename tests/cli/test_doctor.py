"""`hetero doctor` as scripts and people call it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hetero.engine.model_runner import ModelRunner


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_lines_of_a_model_that_is_well(hetero: Any, tiny_moe_dir: Path) -> None:
    done = hetero("doctor", tiny_moe_dir, "--json", "--device", "cpu", "--threads", "1")
    found = lines(done.out)
    assert all(set(line) == {"check", "ok", "value", "fix"} for line in found)
    assert [line for line in found if not line["ok"]] == []
    assert done.status == 0
    groups = list(dict.fromkeys(line["check"].split("/")[0] for line in found))
    assert groups[:6] == ["versions", "kernels", "speed", "processes", "memory", "model"]
    assert groups[6:] == ["experts", "adapter", "exact", "cache"]
    assert any(line["check"] == "model/exact_parts" and "Mixtral" in line["value"] for line in found)


def test_red_is_exit_status_1_and_says_what_to_do(hetero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model: the tiny one; as a table."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(ModelRunner, "namespace", lambda runner, version=None: "policy:0")
    monkeypatch.setattr(ModelRunner, "resident", lambda runner: {"policy:0"})
    monkeypatch.setattr(ModelRunner, "_weights", lambda runner, runs: nullcontext())
    done = hetero("doctor", "--device", "cpu", "--threads", "1")
    assert done.status == 1
    assert "Qwen3MoeForCausalLM on cpu" in done.out
    assert "RED" in done.out
    assert "Call engine.reset_cache() after every update." in done.out


def test_a_model_that_is_not_there(hetero: Any, tmp_path: Path) -> None:
    done = hetero("doctor", tmp_path / "nothing", "--json", "--device", "cpu", "--threads", "1")
    assert done.status == 1
    (red,) = [line for line in lines(done.out) if not line["ok"]]
    assert red["check"] == "model"
    assert "nothing" in red["fix"]
    assert any(line["check"] == "kernels/isa" for line in lines(done.out))
