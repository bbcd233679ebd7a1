"""One side of a paired benchmark in its own process: prints one JSON line for the request in its argument."""

from __future__ import annotations

import json
import sys
from typing import Any

from hetero.bench import against_transformers, ours
from hetero.bench.workload import Workload


def run(request: dict[str, Any]) -> dict[str, object]:
    """Measure what the request names: {side, model, workload, threads, repeats, format, dtype,
    experts}."""
    workload = Workload(**request["workload"])
    common = {"repeats": request["repeats"], "threads": request["threads"]}
    if request["side"] == "hetero":
        return ours.measure(request["model"], workload, **common, format=request["format"]).as_dict()
    peer = {"dtype": request["dtype"], "experts": request["experts"]}
    return against_transformers.measure(request["model"], workload, **peer, **common).as_dict()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(json.loads(sys.argv[1]))) + "\n")
