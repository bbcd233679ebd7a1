"""`hetero rl`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from hetero import loop
from hetero.cli.dry_run import print_plan
from hetero.cli.quiet import quiet_libraries
from hetero.cli.summary import print_summary
from hetero.errors import HeteroError
from hetero.recipe.recipe import Recipe
from hetero.report.live import live_view
from hetero.report.page import write_report
from hetero.run.stopping import StopRequested


def run(recipe: str, overrides: Sequence[str], out: Path | None, resume: bool, dry_run: bool) -> None:
    """Train, show it, write the report, say what came of it."""
    quiet_libraries()
    resolved = Recipe.load(recipe, overrides)
    if dry_run:
        print_plan(resolved)
        return
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out: the run directory to go on in.")
    folder = out or _new_directory(Path(recipe).stem)
    again = shlex.join(["hetero", "rl", recipe, *overrides, "--out", str(folder), "--resume"])
    try:
        loop.run(resolved, folder, resume=resume, watch=live_view(resolved))
    except StopRequested as asked:
        _report(resolved, folder)
        typer.echo(f"Stopped ({asked}); finished steps are saved. Go on with:\n  {again}", err=True)
        sys.exit(0 if asked.number == signal.SIGTERM else 128 + asked.number)
    except HeteroError:
        if (folder / "metrics.jsonl").exists():
            typer.echo(f"Finished steps are kept in {folder}. Go on with:\n  {again}", err=True)
        raise
    _report(resolved, folder)
    print_summary(resolved, folder)


def _report(recipe: Recipe, folder: Path) -> None:
    if recipe.log.report:
        write_report(folder)


def _new_directory(name: str) -> Path:
    """runs/<name>, or the first of runs/<name>-2, -3 ... that is free."""
    number = 1
    while (path := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path
