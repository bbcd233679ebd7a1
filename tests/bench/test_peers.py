"""Other projects' experts beside ours: the same layer, or a clear word on what is missing."""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from typing import Any

import fake_kt
import pytest
import torch

from hetero.bench import against_kt_sft, kt_pool, moe
from hetero.bench.case import Settings
from hetero.bench.machine import Machine
from hetero.bench.moe_check import Inputs
from hetero.bench.shapes import MoeShape
from hetero.bench.timing import Budget
from hetero.errors import ArgumentError, UnavailableError, WrongResultError
from hetero.kernels.ops.expert_lora import FACTORS

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


@pytest.mark.parametrize("changes", [{"backward": True}, {"lora_rank": 4}])
def test_what_is_not_compared(changes: dict[str, Any], machine: Machine) -> None:
    with pytest.raises(ArgumentError, match="forward only"):
        line("llama.cpp", machine, **changes)
    with pytest.raises(ArgumentError, match="both --backward and --lora-rank or neither"):
        line("kt-kernel", machine, **changes)


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
    def made(settings: Settings, weights: Any, loras: Any, threads: int) -> Any:
        weights.gate_up.neg_()
        return make(settings, weights, loras, threads)

    return made


TRAINING = {"backward": True, "lora_rank": 4}
TRAINED = [
    ("bf16", "kt-kernel"),
    ("int4", "kt-kernel"),
    ("int4", "kt-kernel-bf16"),
    ("fp8", "kt-kernel-bf16"),
]


@pytest.fixture
def kt(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The stand-in, importable as kt-kernel."""
    monkeypatch.setitem(sys.modules, "kt_kernel", fake_kt.package())
    return monkeypatch


@pytest.mark.parametrize(("format", "peer"), TRAINED)
@pytest.mark.parametrize("recompute", [False, True])
def test_training_of_kt_kernel(
    format: str, peer: str, recompute: bool, machine: Machine, kt: pytest.MonkeyPatch
) -> None:
    record = line(peer, machine, format, recompute=recompute, **TRAINING)
    assert record["peer"] == peer
    assert record["peer_format"] == ("bf16" if peer.endswith("bf16") else format)
    assert record["ratio_min"] <= record["ratio"] <= record["ratio_max"]


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_training_of_kt_kernel_itself(format: str, machine: Machine) -> None:
    package = pytest.importorskip("kt_kernel")
    if not hasattr(package.kt_kernel_ext.moe, against_kt_sft.KINDS[format]):
        pytest.skip("this variant of kt-kernel does not train")
    assert line("kt-kernel", machine, format, **TRAINING)["peer_format"] == format


@pytest.mark.parametrize("what", ["x", "weights", *FACTORS])
def test_a_wrong_gradient_is_told(what: str, machine: Machine, kt: pytest.MonkeyPatch) -> None:
    backward = fake_kt.Layer.backward_task

    def wrong(layer: fake_kt.Layer, dout: int, *rest: Any) -> Any:
        task, place = backward(layer, dout, *rest), rest[["x", *FACTORS, "weights"].index(what)]
        return lambda: (task(), ctypes.memset(place, 0, 40 if what == "weights" else 1024))

    kt.setattr(fake_kt.Layer, "backward_task", wrong)
    name = {"x": "dx of kt-kernel", "weights": "kt-kernel's expert weights"}.get(what, f"kt-kernel's {what}")
    with pytest.raises(WrongResultError, match=f"{name} differs"):
        line("kt-kernel", machine, "bf16", **TRAINING)


def test_a_variant_that_does_not_train(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kt_kernel", fake_kt.package("avx512_vbmi", trains=False))
    with pytest.raises(
        UnavailableError, match=r"avx512_vbmi, which has no AMXBF16_SFT_MOE.*KT_KERNEL_CPU_VARIANT"
    ):
        line("kt-kernel", machine, "bf16", **TRAINING)


def test_what_kt_kernel_does_not_train(machine: Machine, kt: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"--format fp8 has no counterpart.*bf16, int8, int4"):
        line("kt-kernel", machine, "fp8", **TRAINING)
    uneven = "E=4,top_k=2,hidden=200,intermediate=64"
    with pytest.raises(ArgumentError, match="multiples of 32; got hidden=200"):
        list(moe.cases(Settings(uneven, tokens=(5,), against="kt-kernel", rotate=1, **TRAINING), machine))
    with pytest.raises(ArgumentError, match="without biases"):
        kt_pool.check_shape(MoeShape(4, 2, 64, 64, bias=True))


def test_the_faster_pool_is_taken(kt: pytest.MonkeyPatch) -> None:
    class Slow(kt_pool.Pool):
        def __init__(self, workers: int) -> None:
            super().__init__(fake_kt.package().kt_kernel_ext, workers)
            self.workers, self.layers = workers, [None]

        def run(self, inputs: Inputs, copy: int) -> None:
            time.sleep(0.001 if inputs.x.shape[0] == self.workers else 0.02)

    faster = kt_pool.Faster(Slow, threads=2)
    for tokens in (1, 2, 1):
        x = torch.empty(tokens, 4)
        assert faster.of(Inputs(x, x, x, x)).workers == tokens
    assert len(kt_pool.Faster(Slow, threads=1).pools) == 1


@pytest.mark.parametrize("backward", [False, True])
def test_torch_has_the_numbers_that_our_codes_stand_for(machine: Machine, backward: bool) -> None:
    record = line("torch", machine, "int4", backward=backward)
    assert record["peer_format"] == "bf16"
    assert line("torch-fp32", machine, "int4", backward=backward)["peer_format"] == "fp32"
