"""The last paragraph of a run: what became better, and what to do with it."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import Any

import typer

from hetero.formats import AUTO
from hetero.recipe.recipe import Recipe
from hetero.report.numbers import fixed
from hetero.run.directory import RunDirectory

_ENDS = 5
"""Steps at either end that are averaged."""


def print_summary(recipe: Recipe, out: Path) -> None:
    """Compare the first steps with the last ones, and the first evaluation with the last one."""
    folder = RunDirectory(out)
    steps, evals = folder.metrics.read(), folder.eval.read()
    said = [f"{len(steps)} steps in {_minutes(steps)}."]
    rewards = [r for record in steps if (r := record.get("reward")) is not None]
    if rewards:
        count = max(1, min(_ENDS, len(rewards) // 2))
        first, last = statistics.mean(rewards[:count]), statistics.mean(rewards[-count:])
        said.append(f"Mean reward, first and last {count} step(s): {fixed(first)} -> {fixed(last)}.")
    if len(evals) > 1 and None not in (evals[0]["accuracy"], evals[-1]["accuracy"]):
        said.append(f"Held-out accuracy: {evals[0]['accuracy']:.3f} -> {evals[-1]['accuracy']:.3f}.")
    typer.echo(" ".join(said))
    if recipe.log.report:
        typer.echo(f"Curves and completions: {out / 'report.html'}")
    talk = ["hetero", "chat", recipe.model.path, "--adapter", str(out / "adapter")]
    if recipe.model.experts != AUTO:
        talk += ["--experts", recipe.model.experts]
    typer.echo(f"Talk to it:  {shlex.join(talk)}")


def _minutes(steps: list[dict[str, Any]]) -> str:
    seconds = sum(record["time/step"] for record in steps)
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.1f} seconds"
