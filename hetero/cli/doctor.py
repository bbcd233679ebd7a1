"""`hetero doctor`: print findings as JSON lines, or as a table with what to do about the red ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table

from hetero.cli.quiet import quiet_libraries
from hetero.doctor.examination import examine
from hetero.doctor.finding import Finding


def run(model: str | None, device: str, threads: int | None, as_json: bool) -> None:
    """Examine; exit status 1 when something is red."""
    quiet_libraries()
    warnings.simplefilter("ignore")  # what they say is found again
    found = []
    findings = examine(model, device=device, threads=threads)
    if as_json:
        for finding in findings:
            typer.echo(json.dumps(finding.as_dict()))
            found.append(finding)
    else:
        found = _shown(findings)
    if not all(finding.ok for finding in found):
        raise typer.Exit(1)


def _shown(findings: Iterator[Finding]) -> list[Finding]:
    console, found = Console(), list[Finding]()
    with console.status("examining this machine ...") as status:
        for finding in findings:
            found.append(finding)
            status.update(f"{finding.check}: {finding.value}")
    table = Table(title="hetero doctor")
    for name in ("", "check", "value"):
        table.add_column(name, overflow="fold")
    for finding in found:
        mark, style = ("ok", "") if finding.ok else ("RED", "red")
        table.add_row(mark, finding.check, _text(finding), style=style)
    console.print(table)
    red = [finding for finding in found if not finding.ok]
    for finding in red:
        console.print(f"{finding.check}: {finding.fix}", style="red", markup=False, highlight=False)
    if not red:
        console.print("All is well.")
    return found


def _text(finding: Finding) -> str:
    value = finding.value
    return f"{value:.3g}" if isinstance(value, float) else str(value)
