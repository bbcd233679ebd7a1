"""`hetero report`."""

from __future__ import annotations

from pathlib import Path

import typer

from hetero.report.page import write_report


def run(directory: Path) -> None:
    """Write the page and say where it is."""
    typer.echo(write_report(directory))
