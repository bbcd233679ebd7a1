"""Threads and instruction sets: selection, sharing, forking, sleeping."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from hetero import _C
from hetero.errors import UnavailableError
from hetero.kernels import cpu


def product(ctx: cpu.Context | None = None) -> torch.Tensor:
    weight = cpu.pack(torch.arange(64 * 64).view(64, 64).remainder(7).float())
    return cpu.linear(torch.ones(300, 64), weight, out_dtype=torch.float32, ctx=ctx)[0]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_scalar_runs_everywhere_and_the_best_is_the_default() -> None:
    assert cpu.isas()[0] == "scalar"
    assert {"amx_emulated", "avx512bf16_emulated"} <= set(cpu.isas(emulated=True)) - set(cpu.isas())
    got = run_python("from hetero.kernels import cpu; print(cpu.isa())", HETERO_ISA="")
    assert got.stdout.strip() == cpu.isas()[-1]


def test_bf16_products_rank_below_fp32_ones_where_they_take_twice_as_long() -> None:
    names = [name for name, _, _ in _C.isas()]
    if "avx512bf16" not in names:
        pytest.skip("a processor of another architecture")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        first = dict(
            line.replace("\t", "").strip().split(":", 1) for line in file.read().split("\n\n")[0].split("\n")
        )
    cooper_lake = first["cpu family"].strip() == "6" and first["model"].strip() == "85"
    halves = first["vendor_id"].strip() == "GenuineIntel" and not cooper_lake
    assert (names.index("avx512bf16") < names.index("avx512vnni")) == halves
    assert names[-1] == "amx"


@pytest.mark.parametrize("isa", cpu.isas())
def test_the_environment_chooses(isa: str) -> None:
    got = run_python("from hetero.kernels import cpu; print(cpu.isa())", HETERO_ISA=isa)
    assert got.stdout.strip() == isa


@pytest.mark.parametrize("isa", ["avx1024", "AVX2"])
def test_what_cannot_run_is_named_with_what_can(isa: str) -> None:
    with pytest.raises(UnavailableError, match=f"'{isa}'.*scalar"):
        cpu.Context(isa=isa)
    code = (
        "from hetero.kernels import cpu; from hetero.errors import UnavailableError\n"
        "try: cpu.isa()\n"
        "except UnavailableError as e: print(e)"
    )
    text = run_python(code, HETERO_ISA=isa).stdout
    assert isa in text
    assert "HETERO_ISA" in text
    assert ", ".join(cpu.isas()) in text


def test_an_instruction_set_of_another_processor_is_unavailable() -> None:
    foreign = {"avx2", "avx512", "avx512vnni", "avx512bf16", "amx"} - set(cpu.isas())
    for isa in foreign:
        with pytest.raises(UnavailableError, match=isa):
            cpu.Context(isa=isa)


def test_threads_default_to_the_cores_of_the_affinity_mask() -> None:
    assert 1 <= cpu.Context().threads <= len(os.sched_getaffinity(0))
    one = sorted(os.sched_getaffinity(0))[0]
    pin = f"import os; os.sched_setaffinity(0, {{{one}}})\n"
    code = pin + "from hetero.kernels import cpu; print(cpu.context().threads)"
    assert run_python(code).stdout.strip() == "1"
    with pytest.raises(ValueError, match="at least 1"):
        cpu.Context(threads=0)


def test_more_threads_than_the_system_gives_are_an_error_and_not_the_end() -> None:
    code = (
        "import resource\n"
        "from hetero.errors import ArgumentError\n"
        "from hetero.kernels import cpu\n"
        "taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "hard = resource.getrlimit(resource.RLIMIT_AS)[1]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 29), hard))\n"
        "try:\n"
        "    cpu.Context(threads=50_000)\n"
        "except ArgumentError as error:\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))\n"
        "    print(error, cpu.Context(threads=2).threads)\n"
    )
    said = run_python(code).stdout
    assert "of the 50000 threads that were asked for; ask for fewer 2" in said


def test_using_nests_and_restores() -> None:
    default, other = cpu.context(), cpu.Context(1, "scalar")
    with cpu.using(other):
        assert cpu.context() is other
        assert cpu.isa() == "scalar"
        with cpu.using(default):
            assert cpu.context() is default
        assert cpu.context() is other
    assert cpu.context() is default


def test_one_context_serves_many_python_threads() -> None:
    ctx, want, wrong = cpu.Context(2), product(), []

    def work() -> None:
        for _ in range(50):
            if not torch.equal(product(ctx), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own() -> None:
    ctx, want = cpu.Context(3), product()
    assert torch.equal(product(ctx), want)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(product(ctx), want) for _ in range(20))
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert torch.equal(product(ctx), want)


def test_idle_threads_sleep() -> None:
    ctx = cpu.Context(4)
    product(ctx)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_more_threads_than_processors_do_not_collapse() -> None:
    def best(ctx: cpu.Context) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            product(ctx)
            times.append(time.perf_counter() - start)
        return min(times)

    few, many = cpu.Context(1), cpu.Context(8 * len(os.sched_getaffinity(0)))
    assert torch.equal(product(few), product(many))
    assert best(many) < 20 * best(few) + 0.005


def test_the_float_state_of_the_caller_does_not_matter(ctx: cpu.Context) -> None:
    weight = cpu.pack(torch.eye(64))
    x = torch.full((3, 64), 1e-39)  # denormal
    results = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        results.append(cpu.linear(x.bfloat16(), weight, out_dtype=torch.float32, ctx=ctx)[0])
    torch.set_flush_denormal(False)
    assert torch.equal(*results)
    assert float(torch.tensor(1e-39) * 1.0) != 0.0  # and the caller's state is as it was


def test_contexts_come_and_go() -> None:
    for _ in range(50):
        product(cpu.Context(3))
    assert len(os.listdir("/proc/self/task")) < 100
