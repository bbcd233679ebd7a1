"""A wrong recipe is one paragraph: file and line, the key, what was got, what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import RecipeError
from hetero.recipe.recipe import Recipe

GOOD = """\
model: {path: some/dir}
data:
  train: arithmetic
  eval: arithmetic
rl:
  rewards: [last_number]
  group_size: 4
train:
  steps: 3
  lr: 2e-4
"""


def message(text: str, *overrides: str, folder: Path) -> str:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path, overrides)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("line", "instead", "place", "parts"),
    [
        ("  group_size: 4", "  group_sise: 4", "r.yaml:7", ["rl.group_sise", "Did you mean rl.group_size?"]),
        ("  lr: 2e-4", "  learning_rate: 2e-4", "r.yaml:10", ["Did you mean train.lr?"]),
        ("  lr: 2e-4", "  group_size: 4", "r.yaml:10", ["Did you mean model.group_size or rl.group_size?"]),
        ("rl:", "rll:", "r.yaml:5", ["no key rll.", "Did you mean rl?"]),
        (
            "  lr: 2e-4",
            "  lr: fast",
            "r.yaml:10",
            ["train.lr is 'fast'", "must be a number", "Peak learning rate"],
        ),
        ("  lr: 2e-4", "  lr: -1", "r.yaml:10", ["train.lr is -1", "more than 0"]),
        ("  steps: 3", "  steps: 2.5", "r.yaml:9", ["train.steps is 2.5", "a whole number"]),
        ("  steps: 3", "  steps: '3'", "r.yaml:9", ["train.steps is '3'", "a whole number"]),
        ("  steps: 3", "  steps: true", "r.yaml:9", ["train.steps is true", "a whole number"]),
        ("  steps: 3", "  steps:", "r.yaml:9", ["train.steps is null", "a whole number"]),
        ("  lr: 2e-4", "  schedule: cosin", "r.yaml:10", ["Did you mean cosine?"]),
        (
            "  group_size: 4",
            "  correction: token_truncate\n  correction_low: 0.5",
            "r.yaml:7",
            ["rl.correction cannot be used", "only has an upper bound", "token_mask"],
        ),
        ("  lr: 2e-4", "  betas: [0.9]", "r.yaml:10", ["train.betas", "two numbers"]),
        ("  lr: 2e-4", "  lr: .inf", "r.yaml:10", ["train.lr", "finite"]),
        ("rl:", "engine: {kv_ram: lots}\nrl:", "r.yaml:5", ["engine.kv_ram is 'lots'"]),
        (
            "rl:",
            "engine: {kv_disk_size: 1GiB}\nrl:",
            "r.yaml:5",
            ["kv_disk_size is 1GiB", "no engine.kv_disk"],
        ),
        ("  group_size: 4", "  group_size: 1", "r.yaml:7", ["rl.group_size is 1", "at least 2"]),
        ("  group_size: 4", "  top_p: 0.9", "r.yaml:7", ["rl.top_p", "full distribution"]),
        ("  eval: arithmetic", "  held_out: 1.5", "r.yaml:4", ["data.held_out is 1.5", "less than 1"]),
        (
            "model: {path: some/dir}",
            "model: {path: x, experts: int5}",
            "r.yaml:1",
            ["'int5'", "There are: auto, bf16"],
        ),
        (
            "model: {path: some/dir}",
            "model: {path: x, experts: int4, group_size: 48}",
            "r.yaml:1",
            ["model.group_size is 48", "32", "128"],
        ),
        (
            "model: {path: some/dir}",
            "model: {path: x, experts: bf16, group_size: 64}",
            "r.yaml:1",
            ["model.group_size cannot be used", "has no scales"],
        ),
        (
            "model: {path: some/dir}",
            "model:\n  path: x\n  symmetric: false",
            "r.yaml:3",
            ["model.symmetric cannot be used", "means nothing without a format"],
        ),
        (
            "model: {path: some/dir}",
            "model: {path: x, scale_search: mse}",
            "r.yaml:1",
            ["model.scale_search is mse", "names a format with scales"],
        ),
        ("model: {path: some/dir}", "model: [x]", "r.yaml:1", ["model is ['x']", "a mapping"]),
        (
            "model: {path: some/dir}",
            "model: {}",
            "r.yaml:1",
            ["model.path is missing", "Write path: under model."],
        ),
        ("  group_size: 4", "  group_size: 4\n  group_size: 8", "r.yaml:8", ["already given in line 7"]),
        ("  rewards: [last_number]", "  rewards: []", "r.yaml:6", ["rl.rewards is []", "at least 1"]),
        (
            "  rewards: [last_number]",
            "  rewards:\n  - {function: last_number, weigth: 2}",
            "r.yaml:7",
            ["rl.rewards.0.weigth", "Did you mean rl.rewards.0.weight?"],
        ),
        ("  lr: 2e-4", "\tlr: 2e-4", "r.yaml:10", ["not valid YAML", "colons around here"]),
        ("[last_number]", "[last_numbr]", "r.yaml:6", ["rl.rewards.0", "Did you mean last_number?"]),
        ("[last_number]", "[gone.py:f]", "r.yaml:6", ["rl.rewards.0", "no file gone.py"]),
        ("  group_size: 4", "  algorithm: gpro", "r.yaml:7", ["rl.algorithm", "Did you mean grpo?"]),
        ("  lr: 2e-4", "lora: {targets: [expert]}", "r.yaml:10", ["lora.targets", "Did you mean experts?"]),
    ],
)
def test_message(line: str, instead: str, place: str, parts: list[str], tmp_path: Path) -> None:
    assert line in GOOD
    said = message(GOOD.replace(line, instead, 1), folder=tmp_path)
    for part in (place, *parts):
        assert part in said, said


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lr=fast", ["override train.lr=fast", "must be a number"]),
        ("trian.lr=1", ["no key trian.", "Did you mean train?"]),
        ("lr=1", ["no key lr.", "Did you mean train.lr?"]),
        ("train.lr", ["key.sub=value"]),
        ("train..lr=1", ["key.sub=value"]),
        ("rl.stop=[a, b", ["not valid YAML"]),
        ("rl.rewards.3=x", ["a list of 1", "number under 1"]),
        ("model.path.x=1", ["model.path is 'some/dir'", "no keys"]),
        ("rl.group_size=1", ["override rl.group_size=1", "at least 2"]),
    ],
)
def test_override_message(override: str, parts: list[str], tmp_path: Path) -> None:
    said = message(GOOD, override, folder=tmp_path)
    for part in parts:
        assert part in said, said


def test_a_null_override_clears_a_key(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert Recipe.load(path, ["data.eval=null"]).data.eval is None


def test_every_problem_is_named(tmp_path: Path) -> None:
    said = message(GOOD, "train.lr=0", "rl.group_sise=1", "eval.every=-1", folder=tmp_path)
    for part in ("3 problems", "(1)", "(3)", "train.lr is 0", "rl.group_sise", "eval.every"):
        assert part in said


def test_problems_between_keys_are_all_named(tmp_path: Path) -> None:
    said = message(GOOD, "train.warmup_steps=9", "data.held_out=0.5", folder=tmp_path)
    assert "2 problems" in said
    assert "train.warmup_steps is 9" in said
    assert "data.held_out is 0.5" in said


def test_a_recipe_that_is_not_utf_8_says_where(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(GOOD.replace("some/dir", "d\xe9j\xe0").encode("latin1"))
    with pytest.raises(RecipeError, match=r"r\.yaml:1: byte 0xe9 is not UTF-8.*iconv"):
        Recipe.load(path)


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(RecipeError, match="no recipe file nowhere"):
        Recipe.load("nowhere.yaml")
    with pytest.raises(RecipeError, match="no recipe 'nowhere'"):
        Recipe.load("nowhere")


def test_not_a_mapping(tmp_path: Path) -> None:
    assert "mapping of sections" in message("- 1\n", folder=tmp_path)
    assert "4 problems" in message("", folder=tmp_path)


def test_groups_of_one_are_fine_without_a_group_baseline(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert Recipe.load(path, ["rl.group_size=1", "rl.algorithm=reinforce++"]).rl.group_size == 1


def test_targets_may_be_regular_expressions(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD, encoding="utf-8")
    targets = [".*self_attn.(q|v)_proj", "experts"]
    assert Recipe.load(path, [f"lora.targets={targets}"]).lora.targets == targets
