"""Row operations, and what exactness costs: the records and the sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero.bench import exactness, rows, shapes
from hetero.bench.case import PEERS, Settings
from hetero.bench.machine import Machine
from hetero.bench.shapes import AttentionShape, LinearShape, ModelShape, MoeShape
from hetero.bench.timing import Budget
from hetero.errors import ArgumentError, WrongResultError
from hetero.kernels import cpu, ops

ROWS = "E=8,top_k=2,hidden=96,vocab=130"
TINY = ModelShape(
    MoeShape(4, 2, 64, 32),
    AttentionShape(4, 2, 16),
    {"q_proj": LinearShape(64, 64), "k_proj": LinearShape(32, 64), "lm_head": LinearShape(100, 64)},
    layers=3,
)


def settings(shape: str, **changes: Any) -> Settings:
    base: dict[str, Any] = {"tokens": (3, 9), "budget": Budget(1, 0.0), "rotate": 10**4}
    return Settings(shape, **(base | changes))


@pytest.mark.parametrize("isa", cpu.isas(emulated=True))
def test_rows_of_every_isa(machine: Machine, isa: str) -> None:
    found = [
        (x["shape"].split("/")[1], x["tokens"]) for x in rows.cases(settings(ROWS, isas=(isa,)), machine)
    ]
    assert found == [(name, n) for name in ("rms_norm", "router", "sample") for n in (3, 9)]
    back = list(rows.cases(settings(ROWS, isas=(isa,), backward=True), machine))
    assert len(back) == 4
    assert all(line["backward"] and line["ms"] > 0 for line in back)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("backward", [False, True])
def test_rows_against_torch(machine: Machine, peer: str, backward: bool) -> None:
    for line in rows.cases(settings(ROWS, against=peer, backward=backward), machine):
        assert line["peer"] == peer
        assert line["peer_ms"] > 0


@pytest.mark.parametrize("name", ["rms_norm", "softmax", "sample"])
def test_a_wrong_row_operation_is_not_timed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = getattr(ops, name)

    def wrong(*args: Any) -> Any:
        out = right(*args)
        return (out[0], out[1] * 1.1, out[2]) if isinstance(out, tuple) else out * 1.1

    monkeypatch.setattr(ops, name, wrong)
    with pytest.raises(WrongResultError):
        list(rows.cases(settings(ROWS), machine))


def test_cost_of_a_step(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    ratios = {"torch": 2.0, "torch-fp32": 0.5}

    def paired(ours: Any, peer: Any, budget: Any, threads: int, name: str, pause: float = 0.0) -> Any:
        ours(0)
        peer(0)
        return rows.time_calls(ours, budget), {"peer": name, "peer_ms": 1.0, "ratio": ratios[name]}

    for module in (rows, exactness.linear, exactness.moe, exactness.attention):
        monkeypatch.setattr(module, "time_pairs", paired)
    lines = list(exactness.cases(settings("tiny"), machine, context=5))
    decode = [(line["part"], line["calls"]) for line in lines if line["phase"] == "decode"]
    layers = [("moe", 3), ("q_proj", 3), ("k_proj", 6), ("lm_head", 1), ("attention", 3)]
    assert decode == [*layers, ("rms_norm", 7), ("router", 3), ("sample", 1), ("all", 1)]
    parts = [line for line in lines if line["part"] != "all"]
    assert {(line["fastest"], line["cost"]) for line in parts} == {("torch-fp32", 0.5)}
    for whole in (line for line in lines if line["part"] == "all"):
        own = [line for line in parts if line["phase"] == whole["phase"]]
        assert whole["ms"] == pytest.approx(sum(line["ms"] for line in own))
        assert whole["cost"] == pytest.approx(0.5)
    ratios["torch-fp32"] = 3.0
    lines = list(exactness.cases(settings("tiny"), machine, context=5))
    assert {(line["fastest"], line["cost"]) for line in lines if line["part"] != "all"} == {("hetero", 0.0)}
    assert [line["cost"] for line in lines if line["part"] == "all"] == [0.0, 0.0]


def test_an_unknown_model_or_peer() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'quickstart'"):
        list(exactness.cases(settings("quickstar"), None))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="torch-fp32"):
        settings("quickstart", against="numpy")


def test_the_peer_runs_in_its_dtype() -> None:
    assert settings(ROWS, against="torch-fp32").peer_dtype is torch.float32
    assert settings(ROWS, against="torch").peer_dtype is torch.bfloat16
