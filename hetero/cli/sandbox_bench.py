"""`hetero sandbox bench`."""

from __future__ import annotations

import json

from hetero.sandbox.bench import measure


def run(as_json: bool, n: int) -> None:
    """Print one line per operation."""
    for row in measure(n):
        if as_json:
            print(json.dumps(row), flush=True)
        elif row["op"] == "idle":
            print(f"idle        {row['pss_mb']:8.2f} MB per sandbox")
        else:
            print(
                f"{row['op']:11} {row['p50_ms']:8.2f} ms median  {row['p99_ms']:8.2f} ms p99  (n={row['n']})"
            )
