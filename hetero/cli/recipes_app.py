"""`hetero recipes list | show | validate | schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from hetero.cli.commands import command

recipes = typer.Typer(
    help="The recipes that come with hetero, and checks of yours.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NameArg = Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with hetero.")]


@recipes.command("list")
def list_recipes() -> None:
    """Name the recipes that come with hetero."""
    command("recipes")


@recipes.command()
def show(recipe: NameArg) -> None:
    """Print a recipe file, comments and all, to copy and change."""
    command("recipes", recipe=recipe)


@recipes.command()
def validate(
    recipe: NameArg,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Overrides of recipe keys.")
    ] = None,
) -> None:
    """Check a recipe without loading anything."""
    command("check", recipe=recipe, overrides=overrides or [])


@recipes.command()
def schema() -> None:
    """Print the JSON schema of recipes, for an editor's completion and checks."""
    command("check")
