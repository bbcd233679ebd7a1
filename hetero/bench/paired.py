"""Paired runs: ours and a peer in turn, each in a fresh process, and the ratio of every pair.

A shared machine drifts, so that a ratio of neighbours says more than two absolute figures.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.bench.case import Work, rates
from hetero.bench.machine import Machine
from hetero.bench.workload import Workload
from hetero.errors import UnavailableError
from hetero.run.child import IMPORT_ROOT


@dataclass(frozen=True, slots=True)
class Peer:
    """How the peer runs: its dtype and Transformers' experts implementation."""

    dtype: str = "bfloat16"
    experts: str = "grouped_mm"


def pairs(
    model_dir: str,
    workload: Workload,
    peer: Peer | None,
    machine: Machine,
    *,
    shape: str,
    format: str,
    num_pairs: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield one record per process, then one with the medians: {tok_s, peer_tok_s, ratio, rss_ratio}.

    Ours have the fields of every benchmark: `tokens` is the rows of a typical step, `ms` its time,
    and the rates are those of the weights and products that it cannot do without (see `model_work`).

    Args:
        shape: what the records call the model. format: of our experts.

    Raises:
        UnavailableError: a side failed; its own last lines are in the message.
    """
    request = {
        "model": str(Path(model_dir).resolve()),
        "workload": asdict(workload),
        "repeats": repeats,
        "threads": machine.threads,
        "format": format,
        **asdict(peer or Peer()),
    }
    head = {"op": workload.case, "shape": shape}
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(num_pairs):
        mine = _run({**request, "side": "hetero"})
        ours.append({**head, "format": format, **_per_step(mine, machine), **mine})
        yield ours[-1]
        if peer is not None:
            other = _run({**request, "side": "transformers"})
            theirs.append({**head, "threads": machine.threads, **other, **asdict(peer)})
            yield theirs[-1]
    yield {**head, "format": format, **_summary(ours, theirs)}


def _per_step(measured: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """The fields that our record shares with the kernel benchmarks; takes the sums out of `measured`."""
    work, seconds = measured.pop("work"), measured["seconds"]
    steps = len(work["rows"])
    return {
        "isa": machine.isa,
        "tokens": round(statistics.median(work["rows"])),
        "threads": machine.threads,
        "backward": measured["case"] == "step",
        "steps": steps,
        "ms": 1e3 * seconds / steps,
        **rates(Work(work["bytes"], work["flops"]), seconds, machine, machine.isa),
    }


def _run(request: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "hetero.bench.side", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=IMPORT_ROOT)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise UnavailableError(f"the {request['side']} side of the benchmark failed:\n{tail}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


SHARED = ("isa", "tokens", "threads", "backward", "steps", "flops_per_byte")
MEDIANS = ("ms", "gbps", "tflops", "share_of_bandwidth", "share_of_peak", "tok_s")


def _summary(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    record = {key: ours[0][key] for key in SHARED} | {"pairs": len(ours)}
    record |= {key: statistics.median(r[key] for r in ours) for key in MEDIANS}
    if theirs:
        record["peer_tok_s"] = statistics.median(r["tok_s"] for r in theirs)
        pairs_of = list(zip(ours, theirs, strict=True))
        record["ratio"] = statistics.median(o["tok_s"] / t["tok_s"] for o, t in pairs_of)
        record["rss_ratio"] = statistics.median(
            o["peak_rss_bytes"] / t["peak_rss_bytes"] for o, t in pairs_of
        )
    return record
