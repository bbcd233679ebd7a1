"""`hetero sandbox bench`."""

from __future__ import annotations

import json
from typing import Any

from hetero.sandbox.bench import measure
from hetero.sandbox.crowd import measure_crowd


def run(as_json: bool, n: int, crowd: int) -> None:
    """Print one line per operation."""
    for row in measure(n):
        print(json.dumps(row) if as_json else _line(row), flush=True)
    if crowd:
        row = measure_crowd(crowd)
        print(json.dumps(row) if as_json else _crowd_line(row))


def _line(row: dict[str, Any]) -> str:
    if row["op"] == "idle":
        return f"idle        {row['pss_mb']:8.2f} MB per sandbox"
    return f"{row['op']:11} {row['p50_ms']:8.2f} ms median  {row['p99_ms']:8.2f} ms p99  (n={row['n']})"


def _crowd_line(row: dict[str, Any]) -> str:
    waits = f"{row['start_p50_ms']:8.2f} ms median  {row['start_p99_ms']:8.2f} ms p99"
    how = f"{row['n']} x {row['command']}, {row['running']} at once, {row['failed']} failed"
    return f"crowd       {waits} from a command's turn to its start  ({how}, {row['seconds']:.1f} s)"
