"""`hetero bench`: run a case, paired against a peer if asked, and print JSON lines or a table."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from hetero.bench.paired import Peer, pairs
from hetero.bench.workload import CASES, Workload
from hetero.errors import RecipeError
from hetero.kernels import cpu
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
        raise RecipeError(f"the case is {case!r}; choose one of: {', '.join(CASES)}")
    if against is not None and against not in PEERS:
        raise RecipeError(f"--against is {against!r}; the peers are: {', '.join(PEERS)}")
    records = pairs(
        resolve_model(model),
        Workload(case, **sizes),
        Peer(**peer) if against else None,
        num_pairs=num_pairs,
        repeats=repeats,
        threads=threads or cpu.context().threads,
    )
    console, summary = Console(), {}
    for summary in records:
        if as_json:
            console.out(json.dumps(summary), highlight=False)
    if not as_json:
        console.print(_table(summary))


def _table(summary: dict[str, object]) -> Table:
    table = Table(title=f"hetero bench {summary['op']}")
    for key in summary:
        table.add_column(key)
    table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in summary.values()))
    return table
