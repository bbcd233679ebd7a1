"""Ours and Transformers on one tiny checkpoint, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from case_fields import FIELDS
from typer.testing import CliRunner

from hetero.bench.machine import Machine
from hetero.bench.model_work import counting
from hetero.bench.paired import Peer, pairs
from hetero.bench.workload import CASES, Workload
from hetero.cli.app import app
from hetero.engine import Engine, SamplingParams
from hetero.errors import UnavailableError
from hetero.models import load_model

EXPERT = 3 * 64 * 96
"""Weights of one expert of the tiny model."""


def sizes_of_the_tiny_model(vocab: int) -> tuple[int, int]:
    """(weights of the linears of both layers, weights of the head); the head's are packed in whole panels."""
    return 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64), -(-vocab // 32) * 32 * 64


@pytest.mark.parametrize("case", CASES)
def test_a_pair_is_measured_from_any_directory(
    case: str, tiny_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    (tmp_path / "hetero").mkdir()
    (tmp_path / "hetero" / "__init__.py").write_text("raise ImportError('sources without an extension')\n")
    (tmp_path / "model").symlink_to(tiny_moe_dir)
    monkeypatch.chdir(tmp_path)
    workload = Workload(case, num_sequences=4, prompt_tokens=5, new_tokens=3, lora_rank=2, group_size=2)
    how: dict[str, Any] = {"shape": "tiny", "format": "bf16", "num_pairs": 1, "repeats": 1}
    ours, theirs, summary = pairs("model", workload, Peer(), machine, **how)
    assert (ours["side"], theirs["side"]) == ("hetero", "transformers")
    assert ours["num_tokens"] == theirs["num_tokens"] == workload.num_tokens()
    assert min(ours["seconds"], theirs["seconds"], ours["peak_rss_bytes"], theirs["peak_rss_bytes"]) > 0
    assert summary["ratio"] == pytest.approx(ours["tok_s"] / theirs["tok_s"])
    assert summary["rss_ratio"] == pytest.approx(ours["peak_rss_bytes"] / theirs["peak_rss_bytes"])
    for record in (ours, summary):
        assert set(record) >= FIELDS
        assert record["share_of_bandwidth"] == pytest.approx(record["gbps"] * 1e9 / machine.read_bandwidth)
        assert record["share_of_peak"] == pytest.approx(record["tflops"] * 1e12 / 1e11)
    # Rows of a step: one per sequence; every prompt; prompts of groups once, new tokens but the last.
    assert ours["tokens"] == {"decode": 4, "prefill": 20, "step": 2 * 5 + 4 * 2}[case]
    assert ours["ms"] * ours["steps"] == pytest.approx(1e3 * ours["seconds"])
    passes = 2 if case == "step" else 1
    linears, head = sizes_of_the_tiny_model(259)
    most = 2 * (linears + head + 2 * 4 * EXPERT) * passes
    one_step = ours["gbps"] * ours["ms"] * 1e6
    assert 2 * (linears + head + 2 * 2 * EXPERT) * passes <= one_step * (1 + 1e-9)
    assert one_step <= most * (1 + 1e-9)


def test_work_is_that_of_the_chosen_experts(tiny_moe_dir: Path) -> None:
    model = load_model(str(tiny_moe_dir), experts="bf16", device="cpu")
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    with counting(model, backward=False, head_rows=1) as work:
        Engine(model).generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert work.rows == [3]
    linears, head = sizes_of_the_tiny_model(model.config.vocab_size)
    met = sum(ids.unique().numel() for ids in chosen)
    assert work.bytes == 2 * (linears + head + met * EXPERT)
    assert work.flops == 2 * (3 * linears + model.config.vocab_size * 64 + 2 * 3 * 2 * EXPERT)


def test_command_line(
    tiny_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    monkeypatch.setattr(Machine, "measure", lambda *args: machine)
    plot = tmp_path / "roofline.svg"
    small = [
        "--sequences",
        "2",
        "--prompt-tokens",
        "4",
        "--new-tokens",
        "2",
        "--pairs",
        "1",
        "--repeats",
        "1",
    ]
    command = ["bench", "decode", str(tiny_moe_dir), "--format", "int4", *small, "--svg", str(plot)]
    result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    records = [json.loads(line) for line in result.output.splitlines()]
    assert [r["op"] for r in records] == ["machine", "decode", "decode"]
    assert {r["format"] for r in records[1:]} == {"int4"}
    assert plot.read_text(encoding="utf-8").count("fill-opacity") == 1
    wrong = CliRunner().invoke(app, ["bench", "decode", str(tiny_moe_dir), "--format", "int3"])
    assert "--format is 'int3'" in str(wrong.exception)


def test_a_side_that_fails_is_told_with_its_last_lines(tmp_path: Path, machine: Machine) -> None:
    workload = Workload("prefill", num_sequences=1, prompt_tokens=2)
    how: dict[str, Any] = {"shape": "none", "format": "bf16", "num_pairs": 1, "repeats": 1}
    with pytest.raises(UnavailableError, match=r"hetero side of the benchmark failed:\n(.|\n)*config.json"):
        list(pairs(str(tmp_path), workload, None, machine, **how))
