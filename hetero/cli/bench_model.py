"""`hetero bench decode | prefill | step`: a whole model, paired against a peer if asked."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero.bench.machine import Machine
from hetero.bench.paired import Peer, pairs
from hetero.bench.roofline import roofline
from hetero.bench.workload import CASES, Workload
from hetero.cli.bench_table import show
from hetero.errors import ArgumentError
from hetero.formats import LOADABLE
from hetero.models.quickstart import resolve_model

PEERS = ("transformers",)


def run(
    *,
    case: str,
    model: str,
    format: str,
    against: str | None,
    peer: dict[str, str],
    num_pairs: int,
    repeats: int,
    threads: int | None,
    as_json: bool,
    svg: Path | None,
    sizes: dict[str, int],
) -> None:
    """Measure one case; `sizes` are fields of `Workload`, `peer` those of `Peer`."""
    if case not in CASES:
        raise ArgumentError(f"the case is {case!r}; choose one of: {', '.join(CASES)}")
    if against is not None and against not in PEERS:
        raise ArgumentError(f"--against is {against!r}; models have the peers {', '.join(PEERS)}")
    if format not in LOADABLE:
        raise ArgumentError(f"--format is {format!r}; models load in {', '.join(LOADABLE)}")
    torch.set_num_threads(1)
    directory, workload = resolve_model(model), Workload(case, **sizes)
    machine = Machine.measure(threads)
    lines = pairs(
        directory,
        workload,
        Peer(**peer) if against else None,
        machine,
        shape=model,
        format=format,
        num_pairs=num_pairs,
        repeats=repeats,
    )
    records = show(machine.as_record(), lines, as_json)
    if svg is not None:
        svg.write_text(roofline(machine.as_record(), records[-1:]), encoding="utf-8")
