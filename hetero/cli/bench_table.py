"""How `hetero bench` shows its records: JSON lines as they come, or one table in the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

HIDDEN = {"op", "flops_per_byte", "ms_min", "ms_max", "rotated_gb", "forward_ms", "pairs", "threads"}
"""Fields that only JSON shows."""


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
    """One row per record; columns that no record fills with anything but nothing are left out."""
    columns = [key for key in dict.fromkeys(k for r in records for k in r) if key not in HIDDEN]
    columns = [key for key in columns if any(r.get(key) not in (None, False, 0) for r in records)]
    made = Table(title=f"hetero bench {records[0]['op']}")
    for key in columns:
        made.add_column(key.replace("share_of_", "of "), justify="right", overflow="fold")
    for record in records:
        made.add_row(*(_cell(key, record.get(key)) for key in columns))
    return made


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key.startswith("share_of_"):
        return f"{value:.0%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
