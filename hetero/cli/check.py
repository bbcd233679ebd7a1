"""`hetero recipes validate | schema`."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from hetero.recipe.catalog import locate
from hetero.recipe.recipe import Recipe


def run(recipe: str | None = None, overrides: Sequence[str] = ()) -> None:
    """Check a recipe; without one, print the schema of all."""
    if recipe is None:
        typer.echo(Recipe.json_schema())
        return
    checked = Recipe.load(recipe, overrides)
    typer.echo(f"{locate(recipe)} is a valid recipe: {checked.train.steps} steps on {checked.model.path}.")
