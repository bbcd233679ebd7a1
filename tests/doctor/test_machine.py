"""What the doctor says about versions, processor, memory and processes."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from hetero.doctor import processes, versions
from hetero.doctor.finding import Finding, guarded
from hetero.doctor.machine import FLAGS, check_machine, instruction_set, threads
from hetero.doctor.memory import available_bytes, check_loaded, check_room, plan_of, resident_bytes
from hetero.doctor.speed import check_speed
from hetero.doctor.tiny import tiny_model
from hetero.errors import ModelError
from hetero.kernels import cpu

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_bounds_are_those_of_the_package() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    for name, bound in versions.BOUNDS.items():
        assert f'"{name}>={bound}"' in text
    assert f'requires-python = ">={versions.PYTHON}"' in text


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(finding.ok for finding in versions.check_versions())
    monkeypatch.setattr(versions, "version", lambda name: {"torch": "2.5.1+cpu"}.get(name, "99"))
    red = [finding for finding in versions.check_versions() if not finding.ok]
    assert [finding.check for finding in red] == ["versions/torch"]
    assert "torch>=2.6" in red[0].fix


AVX512 = FLAGS["avx2"] | FLAGS["avx512"]


def test_the_best_instruction_set_in_use_is_well() -> None:
    found = instruction_set(AVX512, ["scalar", "avx2", "avx512"], "avx512")
    assert found.ok
    assert "no avx512vnni: the processor lacks avx512_vnni" in str(found.value)
    everything = set().union(*FLAGS.values())
    assert instruction_set(everything, ["scalar", *FLAGS], "amx") == Finding(
        "kernels/isa", True, "amx of scalar, avx2, avx512, avx512vnni, avx512bf16, amx"
    )


def test_a_worse_instruction_set_than_possible_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_ISA", "avx2")
    found = instruction_set(AVX512, ["scalar", "avx2", "avx512"], "avx2")
    assert not found.ok
    assert "unset HETERO_ISA" in found.fix
    refused = instruction_set(
        set().union(*FLAGS.values()), ["scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"], "avx512bf16"
    )
    assert not refused.ok
    assert "amx_tile" in refused.fix


@pytest.mark.parametrize(
    ("used", "quota", "ok"), [(2, math.inf, True), (3, math.inf, False), (2, 1.5, True), (2, 0.5, False)]
)
def test_threads(used: int, quota: float, ok: bool) -> None:
    assert threads(used, [0, 5], quota).ok is ok


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with cpu.using(cpu.Context(threads=1)):
        assert {f.check: f.ok for f in check_machine()} == {"kernels/isa": True, "kernels/threads": True}
        assert [f.check for f in check_speed()] == ["speed/read_bandwidth", "speed/peak"]
    with cpu.using(cpu.Context(threads=64, isa="scalar")):
        assert [f.ok for f in check_machine()] == [cpu.isas() == ["scalar"], (os.cpu_count() or 1) >= 64]


def test_memory() -> None:
    with tiny_model() as directory:
        plan = plan_of(str(directory), "cpu")
    assert check_room(plan, plan.total).ok
    assert "engine.kv_memory" in check_room(plan, plan.total - 1).fix
    assert check_room(plan, available_bytes()).ok
    assert check_loaded(plan, 10, 20).ok
    assert not check_loaded(plan, 0, 2 * plan.total + (1 << 30)).ok
    assert resident_bytes() > 1 << 20


def test_no_process_is_left_after_a_kill() -> None:
    (found,) = processes.check_processes()
    assert found == Finding("processes/kill", True, "0 of 5 processes left after kill -9")


def test_a_process_that_is_left_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print('ready', child.pid, flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(processes, "OWNER", [sys.executable, "-c", code])
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    (found,) = processes.check_processes()
    left = re.search(r"kill -9 (\d+)", found.fix)
    assert left is not None
    os.kill(int(left[1]), signal.SIGKILL)
    assert not found.ok


def test_workers_that_do_not_start_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "OWNER", [sys.executable, "-c", "1 / 0"])
    assert [(f.check, f.ok) for f in processes.check_processes()] == [("processes/start", False)]


def test_an_error_is_a_red_finding() -> None:
    def fails() -> object:
        yield Finding("a", True, 1)
        raise ModelError("no such model; take another")

    def breaks() -> object:
        raise ZeroDivisionError
        yield

    assert list(guarded("model", fails)) == [
        Finding("a", True, 1),
        Finding("model", False, "failed", "no such model; take another"),
    ]
    (found,) = guarded("model", breaks)
    assert not found.ok
    assert "report it" in found.fix
