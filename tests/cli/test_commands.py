"""`hetero recipes ...`, `--dry-run`, and how errors look."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero import __version__
from hetero.errors import RecipeError
from hetero.recipe.catalog import shipped
from hetero.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [["--help"], ["rl", "--help"], ["--version"], ["recipes", "list"]])
def test_what_needs_no_model_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['hetero', *{arguments!r}]\n"
        "from hetero.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version(hetero: Any) -> None:
    done = hetero("--version")
    assert (done.status, done.out) == (0, f"hetero {__version__}\n")


def test_list_names_every_recipe_with_a_summary(hetero: Any) -> None:
    listed = dict(line.split(maxsplit=1) for line in hetero("recipes", "list").out.splitlines())
    assert listed.keys() == shipped().keys()
    assert "quickstart" in listed


def test_show_prints_the_file(hetero: Any) -> None:
    assert hetero("recipes", "show", "quickstart").out == shipped()["quickstart"].read_text(encoding="utf-8")


def test_show_suggests(hetero: Any) -> None:
    done = hetero("recipes", "show", "quickstar")
    assert done.status == 1
    assert "Did you mean quickstart?" in done.err


def test_validate(hetero: Any) -> None:
    assert (
        hetero("recipes", "validate", "quickstart", "train.steps=3")
        .out.rstrip()
        .endswith("3 steps on quickstart.")
    )
    done = hetero("recipes", "validate", "quickstart", "train.stepps=3")
    assert (done.status, done.out) == (1, "")
    assert (
        done.err
        == "error: override train.stepps=3: there is no key train.stepps. Did you mean train.steps?\n"
    )


def test_schema_is_json(hetero: Any) -> None:
    assert json.loads(hetero("recipes", "schema").out)["title"] == "Recipe"


def test_usage_errors_exit_with_2(hetero: Any) -> None:
    assert hetero("rl").status == 2
    assert hetero("rl", "quickstart", "--lr", "3").status == 2
    assert hetero("nothing").status == 2


def test_debug_shows_the_traceback(hetero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_DEBUG", "1")
    with pytest.raises(RecipeError):
        hetero("recipes", "validate", "nothing")


def test_dry_run_prints_a_recipe_and_a_plan_and_makes_nothing(
    hetero: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = hetero("rl", "quickstart", "train.steps=3", "--out", "run", "--dry-run")
    assert done.status == 0, done.err
    assert Recipe.from_yaml(done.out) == Recipe.load("quickstart", ["train.steps=3"])
    assert yaml.safe_load(done.out)["train"]["steps"] == 3
    for part in ("692.0 M weights", "637.0 M of them in routed experts", "KV cache", "optimizer", "together"):
        assert part in done.out
    assert not list(tmp_path.iterdir())


def test_dry_run_without_a_reachable_model_still_prints_the_recipe(
    hetero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = hetero("rl", "quickstart", "model.path=/no/such/model", "--dry-run")
    assert done.status == 0
    assert "memory: not known" in done.out


def test_resume_needs_a_directory(hetero: Any) -> None:
    done = hetero("rl", "quickstart", "--resume")
    assert done.status == 2
    assert "--out" in done.err
