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

from hetero.bench.workload import Workload
from hetero.errors import UnavailableError
from hetero.run.child import IMPORT_ROOT


@dataclass(frozen=True, slots=True)
class Peer:
    """How the peer runs: its dtype and Transformers' experts implementation."""

    dtype: str = "bfloat16"
    experts: str = "grouped_mm"


def pairs(
    model_dir: str, workload: Workload, peer: Peer | None, *, num_pairs: int, repeats: int, threads: int
) -> Iterator[dict[str, Any]]:
    """Yield one record per process, then one with the medians: {case, tok_s, peer_tok_s, ratio, rss_ratio}.

    Raises:
        UnavailableError: a side failed; its own last lines are in the message.
    """
    request = {
        "model": str(Path(model_dir).resolve()),
        "workload": asdict(workload),
        "repeats": repeats,
        "threads": threads,
        **asdict(peer or Peer()),
    }
    ours, theirs = [], []
    for _ in range(num_pairs):
        ours.append(_run({**request, "side": "hetero"}))
        yield ours[-1]
        if peer is not None:
            theirs.append({**_run({**request, "side": "transformers"}), **asdict(peer)})
            yield theirs[-1]
    yield _summary(workload.case, ours, theirs)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "hetero.bench.side", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=IMPORT_ROOT)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise UnavailableError(f"the {request['side']} side of the benchmark failed:\n{tail}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _summary(case: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    record = {"op": case, "tok_s": statistics.median(r["tok_s"] for r in ours), "pairs": len(ours)}
    if theirs:
        record["peer_tok_s"] = statistics.median(r["tok_s"] for r in theirs)
        pairs_of = list(zip(ours, theirs, strict=True))
        record["ratio"] = statistics.median(o["tok_s"] / t["tok_s"] for o, t in pairs_of)
        record["rss_ratio"] = statistics.median(
            o["peak_rss_bytes"] / t["peak_rss_bytes"] for o, t in pairs_of
        )
    return record
