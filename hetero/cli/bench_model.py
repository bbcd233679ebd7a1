"""`hetero bench decode | prefill | step`: a whole model, paired against a peer if asked."""

from __future__ import annotations

import torch

from hetero.bench.machine import Machine
from hetero.bench.paired import Peer, pairs
from hetero.bench.workload import CASES, Workload
from hetero.cli.bench_table import show
from hetero.errors import ArgumentError
from hetero.models.quickstart import resolve_model

PEERS = ("transformers",)


def run(
    *,
    case: str,
    model: str,
    against: str | None,
    peer: dict[str, str],
    num_pairs: int,
    repeats: int,
    threads: int | None,
    as_json: bool,
    sizes: dict[str, int],
) -> None:
    """Measure one case; `sizes` are fields of `Workload`, `peer` those of `Peer`."""
    if case not in CASES:
        raise ArgumentError(f"the case is {case!r}; choose one of: {', '.join(CASES)}")
    if against is not None and against not in PEERS:
        raise ArgumentError(f"--against is {against!r}; models have the peers {', '.join(PEERS)}")
    torch.set_num_threads(1)
    directory, workload = resolve_model(model), Workload(case, **sizes)
    machine = Machine.measure(threads)
    lines = pairs(
        directory,
        workload,
        Peer(**peer) if against else None,
        num_pairs=num_pairs,
        repeats=repeats,
        threads=machine.threads,
    )
    records = (
        {"op": case, "shape": model, "isa": machine.isa, "threads": machine.threads, **r} for r in lines
    )
    show(machine.as_record(), records, as_json)
