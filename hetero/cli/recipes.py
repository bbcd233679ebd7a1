"""`hetero recipes ...`."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from hetero.recipe.catalog import locate, shipped, summary
from hetero.recipe.recipe import Recipe


def run(action: str, recipe: str = "", overrides: Sequence[str] = ()) -> None:
    """Do one of list, show, validate, schema; RecipeError if the recipe is not right."""
    if action == "list":
        known = shipped()
        width = max(map(len, known), default=0)
        for name, path in known.items():
            typer.echo(f"{name:<{width}}  {summary(path)}")
    elif action == "show":
        typer.echo(locate(recipe).read_text(encoding="utf-8"), nl=False)
    elif action == "validate":
        checked = Recipe.load(recipe, overrides)
        typer.echo(
            f"{locate(recipe)} is a valid recipe: {checked.train.steps} steps on {checked.model.path}."
        )
    else:
        typer.echo(Recipe.json_schema())
