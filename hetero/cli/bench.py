"""`hetero bench machine | moe | linear | attention`: this machine, and kernels on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hetero.bench import attention, exactness, linear, moe, rows
from hetero.bench.case import EXPERT_PEERS, Settings
from hetero.bench.machine import Machine
from hetero.bench.roofline import roofline
from hetero.bench.timing import Budget
from hetero.cli.bench_table import show
from hetero.errors import ArgumentError, UnavailableError
from hetero.kernels import cpu

CASES = {
    "moe": moe.cases,
    "linear": linear.cases,
    "attention": attention.cases,
    "rows": rows.cases,
    "exactness": exactness.cases,
}


def run(
    *,
    op: str | None = None,
    wanted: dict[str, Any] | None = None,
    tokens: str = "1",
    isas: str | None = None,
    threads: int | None = None,
    repeats: int = 5,
    seconds: float = 1.0,
    svg: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure the machine, then the cases of `op` if there is one; `wanted` are fields of `Settings`."""
    torch.set_num_threads(1)  # its idle threads would take the cores from ours
    names = tuple(name.strip() for name in isas.split(",")) if isas else ()
    _check_isas(names)
    wanted = wanted or {}
    if op != "moe" and wanted.get("against") in EXPERT_PEERS:
        raise ArgumentError(f"{wanted['against']} computes experts only; compare it with `hetero bench moe`")
    budget = Budget(repeats, seconds)
    settings = (
        Settings(**wanted, tokens=parse_tokens(tokens), isas=names, budget=budget) if op is not None else None
    )
    machine = Machine.measure(threads, names)
    lines = CASES[op](settings, machine) if op is not None and settings is not None else ()
    records = show(machine.as_record(), lines, as_json)
    if svg is not None:
        svg.write_text(roofline(machine.as_record(), records), encoding="utf-8")


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "1,8,32" -> (1, 8, 32). Raises ArgumentError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentError(f"--tokens is {text!r}; expected positive numbers such as 1,8,32,2048")
    return tuple(int(part) for part in parts)


def _check_isas(names: tuple[str, ...]) -> None:
    known = cpu.isas(emulated=True)
    for name in names:
        if name not in known:
            raise UnavailableError(
                f"instruction set {name!r} does not run here; here run {', '.join(cpu.isas())}"
            )
