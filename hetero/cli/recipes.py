"""`hetero recipes list | show`."""

from __future__ import annotations

import typer

from hetero.recipe.catalog import locate, shipped, summary


def run(recipe: str | None = None) -> None:
    """Print a recipe file; without one, name those that come with hetero."""
    if recipe is not None:
        typer.echo(locate(recipe).read_text(encoding="utf-8"), nl=False)
        return
    known = shipped()
    width = max(map(len, known), default=0)
    for name, path in known.items():
        typer.echo(f"{name:<{width}}  {summary(path)}")
