"""Every case is checked, then timed, then told in full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from case_fields import FIELDS
from typer.testing import CliRunner

from hetero.bench import against_torch, attention, linear, moe
from hetero.bench.case import PEERS, Settings
from hetero.bench.machine import Machine
from hetero.bench.timing import Budget, check, time_calls
from hetero.cli.app import app
from hetero.errors import ArgumentError, ShapeError, WrongResultError
from hetero.formats import FORMATS
from hetero.kernels import cpu, ops

MOE, LINEAR, ATTENTION = (
    "E=8,top_k=2,hidden=96,intermediate=64",
    "N=96,K=64",
    "heads=4,kv_heads=2,dim=64,window=20",
)


def settings(shape: str, **changes: Any) -> Settings:
    base: dict[str, Any] = {"tokens": (1, 33), "budget": Budget(2, 0.0), "rotate": 10**5}
    return Settings(shape, **(base | changes))


def complete(line: dict[str, Any], machine: Machine) -> None:
    assert set(line) >= FIELDS
    assert json.loads(json.dumps(line)) == line
    assert line["ms_min"] <= line["ms"] <= line["ms_max"]
    assert line["share_of_bandwidth"] == pytest.approx(line["gbps"] * 1e9 / machine.read_bandwidth)
    assert line["share_of_peak"] == pytest.approx(line["tflops"] * 1e12 / 1e11)


@pytest.mark.parametrize("isa", cpu.isas(emulated=True))
def test_forward_of_every_isa(machine: Machine, isa: str) -> None:
    for module, shape in ((moe, MOE), (linear, LINEAR), (attention, ATTENTION)):
        lines = list(module.cases(settings(shape, isas=(isa,)), machine))
        assert [(line["tokens"], line["isa"]) for line in lines] == [(1, isa), (33, isa)]
        for line in lines:
            complete(line, machine)


def test_groups_of_another_size(machine: Machine) -> None:
    sizes = {}
    for group in (None, 32, 128):
        (line,) = moe.cases(settings(MOE, format="int4", group_size=group, tokens=(33,)), machine)
        complete(line, machine)
        sizes[line["group_size"]] = line["gbps"] * line["ms"]  # bytes of a call
        (dense,) = linear.cases(settings(LINEAR, format="int4", group_size=group, tokens=(33,)), machine)
        assert dense["group_size"] == line["group_size"]
    assert set(sizes) == {32, 128}
    assert sizes[128] < 0.95 * sizes[32]
    with pytest.raises(ShapeError, match="group_size=32"):
        settings(MOE, format="fp8", group_size=32)


@pytest.mark.parametrize("format", [name for name, row in FORMATS.items() if not row.imported])
def test_every_format(machine: Machine, format: str) -> None:
    for module, shape in ((moe, MOE), (linear, LINEAR)):
        for backward in (False, True):
            for line in module.cases(settings(shape, format=format, backward=backward), machine):
                complete(line, machine)
                assert line["format"] == format


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_backward(machine: Machine, rank: int, recompute: bool) -> None:
    asked = {"backward": True, "lora_rank": rank}
    for line in moe.cases(settings(MOE, recompute=recompute, **asked), machine):
        complete(line, machine)
        assert 0 < line["forward_ms"] < line["ms_max"]
    for line in linear.cases(settings(LINEAR, **asked), machine):
        complete(line, machine)
    for line in attention.cases(settings(ATTENTION, backward=True), machine):
        complete(line, machine)


def test_decoding_attention(machine: Machine) -> None:
    (line,) = attention.cases(settings("heads=4,kv_heads=2,dim=64", tokens=(3,), context=70), machine)
    complete(line, machine)
    assert line["gbps"] * line["ms"] * 1e6 == pytest.approx(2 * 3 * 70 * 2 * 128)


def test_bytes_and_operations_of_experts(machine: Machine) -> None:
    one, many = moe.cases(settings(MOE), machine)
    weights = 3 * 96 * 64
    assert one["gbps"] * one["ms"] * 1e6 == pytest.approx(2 * 2 * weights)
    assert many["gbps"] * many["ms"] * 1e6 == pytest.approx(8 * 2 * weights)
    assert many["tflops"] * many["ms"] * 1e9 == pytest.approx(2 * 33 * 2 * weights)


@pytest.mark.parametrize("peer", PEERS)
def test_against_torch(machine: Machine, peer: str) -> None:
    asked = {"against": peer, "tokens": (5,)}
    plain = {"heads": "heads=4,kv_heads=2,dim=64"}["heads"]
    for module, shape in ((moe, MOE), (linear, LINEAR), (attention, plain)):
        (line,) = module.cases(settings(shape, **asked), machine)
        assert line["peer"] == peer
        assert line["ratio_min"] <= line["ratio"] <= line["ratio_max"]
    for module, shape in ((moe, MOE), (linear, LINEAR)):
        (line,) = module.cases(settings(shape, backward=True, lora_rank=4, **asked), machine)
        assert line["peer_ms"] > 0


@pytest.mark.parametrize("backward", [False, True])
def test_one_wrong_row_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    right = ops.experts

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        out = right(*args, **options)
        damage = torch.ones(out.shape[0], 1)
        damage[-1] = 1.05
        return out * damage

    monkeypatch.setattr(ops, "experts", wrong)
    with pytest.raises(WrongResultError, match="output of moe differs"):
        list(moe.cases(settings(MOE, backward=backward), machine))


def test_a_wrong_gradient_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.experts
    monkeypatch.setattr(
        ops, "experts", lambda store, x, *a, **o: right(store, x * 1.0, *a, **o) + 0.1 * (x - x.detach())
    )
    with pytest.raises(WrongResultError, match="dx of moe differs"):
        list(moe.cases(settings(MOE, backward=True), machine))


def test_a_peer_that_computes_something_else_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against_torch.Experts, "_activate", lambda self, gate, up: gate * up)
    with pytest.raises(WrongResultError, match="PyTorch's own output"):
        list(moe.cases(settings(MOE, against="torch"), machine))


def test_nan_is_wrong() -> None:
    with pytest.raises(WrongResultError, match="more than"):
        check("it", torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2))


def test_calls_get_consecutive_numbers() -> None:
    numbers: list[int] = []
    times = time_calls(numbers.append, Budget(repeats=3, seconds=0.0))
    assert numbers == [0, 1, 2, 3, 4]
    assert len(times.seconds) == 3


def test_settings_are_checked() -> None:
    with pytest.raises(ArgumentError, match="--format is 'int3'"):
        settings(MOE, format="int3")
    with pytest.raises(ArgumentError, match="no backward"):
        list(attention.cases(settings(ATTENTION, context=4, backward=True), Machine("", "scalar", 1, 1.0)))


def test_command_line(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Machine, "measure", lambda *args: machine)
    quick = ["--tokens", "1,3", "--seconds", "0", "--repeats", "1", "--rotate-gb", "0"]
    plot = tmp_path / "roofline.svg"
    moe_command = ["bench", "moe", "--shape", MOE, *quick, "--svg", str(plot)]
    lines = _run([*moe_command, "--json"]).splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["op"] for record in records] == ["machine", "moe", "moe"]
    assert set(records[0]) == {"op", "cpu", "isa", "threads", "read_gbps", "peak_tflops"}
    assert plot.read_text(encoding="utf-8").count("<circle") == 3
    assert "a processor, 1 threads: 10.0 GB/s" in _run(moe_command)
    assert json.loads(_run(["bench", "machine", "--json"]))["op"] == "machine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1,x"], "--tokens is '1,x'"),
        (["--isa", "sse9"], "instruction set 'sse9' does not run here"),
        (["--against", "magic"], "the peers are torch, torch-fp32, kt-kernel, kt-kernel-bf16, llama.cpp"),
        (["--shape", "nothing"], "is not a known shape"),
    ],
)
def test_command_line_errors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(Machine, "measure", lambda *args: machine)
    result = CliRunner().invoke(app, ["bench", "moe", *arguments])
    assert result.exit_code == 1
    assert message in str(result.exception)


def _run(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_beside_busy_processes(machine: Machine) -> None:
    before = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}
    (line,) = moe.cases(settings(MOE, tokens=(5,), rivals=2), machine)
    complete(line, machine)
    assert line["rivals"] == 2
    assert line["rivals_ms"] > 0
    assert 0 < line["share_of_quiet_min"] <= line["share_of_quiet"]
    new = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()} - before
    assert not any(b"while True: pass" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in new & mine())


def mine() -> set[str]:
    """Processes that this one started."""
    return set(Path("/proc/self/task").joinpath(str(os.getpid()), "children").read_text().split())
