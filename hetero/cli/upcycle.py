"""`hetero upcycle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hetero.cli.quiet import quiet_libraries
from hetero.models.upcycle import upcycle


def run(source: str, out: Path, options: dict[str, Any]) -> None:
    """Write the Mixture of Experts and say where it is."""
    quiet_libraries()
    typer.echo(upcycle(source, out, **options))
