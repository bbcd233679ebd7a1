"""How `hetero bench` shows its records: JSON lines as they come, or one table in the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

HIDDEN = {
    *("op", "threads", "flops_per_byte", "rotated_gb", "pairs", "repeats", "ms_min", "ms_max", "forward_ms"),
    *("ratio_min", "ratio_max", "share_of_quiet_min", "case", "seconds", "num_tokens", "steps"),
}
"""Fields that only JSON shows."""

NAMES = {
    "share_of_bandwidth": "of bandwidth",
    "share_of_peak": "of peak",
    "share_of_quiet": "of quiet speed",
    "gbps": "GB/s",
    "tflops": "TFLOP/s",
    "fastest_ms": "its ms",
}


def show(machine: dict[str, Any], records: Iterable[dict[str, Any]], as_json: bool) -> list[dict[str, Any]]:
    """Print the machine and then the records; returns the records."""
    if as_json:
        typer.echo(json.dumps(machine))
        shown = []
        for line in records:
            typer.echo(json.dumps(line))
            shown.append(line)
        return shown
    console = Console()
    peaks = ", ".join(f"{isa} {peak:.3g}" for isa, peak in machine["peak_tflops"].items())
    console.print(
        f"{machine['cpu']}, {machine['threads']} threads: {machine['read_gbps']:.1f} GB/s; TFLOP/s: {peaks}",
        highlight=False,
    )
    shown = list(records)
    if shown:
        console.print(table(shown))
    return shown


def table(records: list[dict[str, Any]]) -> Table:
    """One row per record. What all records share stands in the title, what none has is left out."""
    columns = [key for key in dict.fromkeys(k for r in records for k in r) if key not in HIDDEN]
    columns = [key for key in columns if any(r.get(key) not in (None, False, 0) for r in records)]
    shared = [key for key in columns if _is_shared(key, records)]
    title = ", ".join(_named(key, records[0][key]) for key in shared)
    made = Table(title=f"hetero bench {records[0]['op']}: {title}".removesuffix(": "))
    columns = [key for key in columns if key not in shared]
    for key in columns:
        made.add_column(NAMES.get(key, key), justify="right")
    for record in records:
        made.add_row(*(_cell(key, record.get(key)) for key in columns))
    return made


def _is_shared(key: str, records: list[dict[str, Any]]) -> bool:
    values = [record.get(key) for record in records]
    return not isinstance(values[0], float) and key != "tokens" and all(v == values[0] for v in values)


def _named(key: str, value: Any) -> str:
    if value is True:
        return key
    return value if isinstance(value, str) and key != "peer" else f"{key} {value}"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key.startswith("share_of_") or key == "cost":
        return f"{value:.0%}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
