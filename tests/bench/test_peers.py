"""Other projects' experts beside ours: the same layer, or a clear word on what is missing."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from hetero.bench import moe
from hetero.bench.case import Settings
from hetero.bench.machine import Machine
from hetero.bench.timing import Budget
from hetero.errors import ArgumentError, UnavailableError, WrongResultError

PEERS = {"kt-kernel": "kt_kernel", "llama.cpp": "llama_cpp"}
SHAPE = "E=8,top_k=2,hidden=256,intermediate=128"


def line(peer: str, machine: Machine, format: str = "int8", **changes: Any) -> dict[str, Any]:
    settings = Settings(
        SHAPE, format, tokens=(5,), against=peer, budget=Budget(2, 0.0), rotate=10**6, **changes
    )
    (record,) = moe.cases(settings, machine)
    return record


@pytest.mark.parametrize(("peer", "package"), PEERS.items())
def test_a_missing_peer_comes_with_its_install_line(
    peer: str, package: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        assert name.startswith(package)
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnavailableError, match=r"cannot be imported \(No module .*pip install"):
        line(peer, machine)


@pytest.mark.parametrize("peer", PEERS)
def test_forward_only(peer: str, machine: Machine) -> None:
    with pytest.raises(ArgumentError, match="forward only"):
        line(peer, machine, backward=True)


@pytest.mark.parametrize(("peer", "package"), PEERS.items())
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_it_computes_the_same_layer(peer: str, package: str, format: str, machine: Machine) -> None:
    pytest.importorskip(package)
    record = line(peer, machine, format)
    assert record["peer"] == peer
    assert record["ratio_min"] <= record["ratio"] <= record["ratio_max"]


@pytest.mark.parametrize(("peer", "package"), PEERS.items())
def test_another_layer_is_told(
    peer: str, package: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(moe, "make_peer", _of_another_seed(moe.make_peer))
    with pytest.raises(WrongResultError, match="own output differs"):
        line(peer, machine)


def _of_another_seed(make: Any) -> Any:
    def made(settings: Settings, weights: Any, copies: int, threads: int) -> Any:
        weights.gate_up.neg_()
        return make(settings, weights, copies, threads)

    return made
