"""Every recipe that comes with hetero is valid, says what it does, and can be planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.cli.dry_run import print_plan
from hetero.recipe.catalog import shipped, summary
from hetero.recipe.recipe import Recipe
from hetero.run.tasks import load_tasks

RECIPES = shipped()
ON_A_LAPTOP = ("bullets", "json_keys", "quickstart", "shell", "short_answers")
"""These run as they are; the others name a model or data that the user brings."""


def test_the_promised_recipes_are_there() -> None:
    assert {*ON_A_LAPTOP, "qwen3_30b_math"} <= RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_described(name: str) -> None:
    recipe = Recipe.load(name)
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert 20 <= len(summary(RECIPES[name])) <= 110


@pytest.mark.parametrize("name", ON_A_LAPTOP)
def test_recipe_has_its_tasks(name: str) -> None:
    recipe = Recipe.load(name)
    tasks = load_tasks(recipe.data, recipe.eval.prompts)
    assert len(tasks.train) >= recipe.rl.prompts_per_step
    assert tasks.held_out
    asked = {str(task.prompt) for task in tasks.train}
    assert not asked & {str(task.prompt) for task in tasks.held_out}


def test_every_file_is_a_recipe() -> None:
    folder = Path(next(iter(RECIPES.values()))).parent
    assert {path.stem for path in folder.iterdir() if path.suffix in (".yaml", ".yml")} == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_can_be_planned(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    print_plan(Recipe.load(name))
    said = capsys.readouterr().out
    assert Recipe.from_yaml(said) == Recipe.load(name)
    assert ("# together" in said) == (name in (*ON_A_LAPTOP, "mbpp"))
