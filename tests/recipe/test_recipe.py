"""Reading, overriding, dumping, comparing."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetero.recipe.difference import differences
from hetero.recipe.overrides import apply
from hetero.recipe.recipe import Recipe
from hetero.recipe.source import parse, scalar
from hetero.recipe.suggest import ELSEWHERE, EXPLAINED, all_paths, known_keys

BASE = "{model: {path: x}, data: {train: arithmetic}, rl: {rewards: last_number}, train: {steps: 3}}"


def recipe(*overrides: str) -> Recipe:
    return Recipe.build(apply(parse(BASE, "base"), overrides))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", float("-inf")),
        ("8", 8),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("+3", 3),
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-11-29", "2026-11-29"),
        ("true", True),
        ("null", None),
        ("", None),
        ("~", None),
        ("'8'", "8"),
        ("[a, 1]", ["a", 1]),
        ("1_000", "1_000"),
    ],
)
def test_scalars_are_yaml_1_2(text: str, value: object) -> None:
    got = scalar(text)
    assert got == value
    assert type(got) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_python_float_is_a_number(value: float) -> None:
    assert scalar(repr(value)) == value


def test_resolved_recipe_reads_back_equal() -> None:
    one = recipe("train.lr=3e-7", "rl.stop=['\\n', é]", "data.prompt='{q}: '", "eval.max_tokens=5")
    assert Recipe.from_yaml(one.to_yaml()) == one
    assert Recipe.from_dict(yaml.safe_load(one.to_yaml())) == one


def test_resolved_recipe_spells_out_every_key() -> None:
    dumped = yaml.safe_load(recipe().to_yaml())
    for path in all_paths(Recipe):
        node = dumped
        for part in path.split("."):
            assert part in node, path
            node = node[part]


def test_overrides_are_typed_and_later_ones_win() -> None:
    got = recipe("train.steps=5", "train.steps=7", "engine.max_num_seqs=3", "data.options={digits: 2}")
    assert (got.train.steps, got.engine.max_num_seqs, got.data.options) == (7, 3, {"digits": 2})
    assert recipe("data.options.digits=2").data.options == {"digits": 2}
    assert (
        recipe("rl.rewards=[{function: exact, weight: 2}]", "rl.rewards.0.weight=3").rl.rewards[0].weight == 3
    )


def test_a_name_is_a_reward_of_weight_one() -> None:
    specs = recipe("rl.rewards=[exact, {function: contains, weight: 0.5}]").rl.rewards
    assert [(s.function, s.weight) for s in specs] == [("exact", 1.0), ("contains", 0.5)]


def test_schema_describes_every_key() -> None:
    schema = json.loads(Recipe.json_schema())
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False, name
        for key, field in section["properties"].items():
            assert field.get("description"), f"{name}.{key}"
    rewards = schema["$defs"]["RLSection"]["properties"]["rewards"]["items"]["anyOf"]
    assert {"type": "string"} in rewards


def test_every_suggested_key_exists_and_no_explained_one_does() -> None:
    paths = set(all_paths(Recipe))
    assert set(ELSEWHERE.values()) <= paths
    assert not {".".join(map(str, key)) for key in EXPLAINED} & paths
    for key in EXPLAINED:
        assert known_keys(Recipe, key[:-1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("train.lr=1", ["train.lr: 3e-05 -> 1.0"]),
        ("train.steps=5", []),
        ("train.steps=2", ["train.steps: 3 -> 2"]),
        ("log.samples=9", []),
        ("engine.kv_memory=2GiB", []),
        ("model.threads=1", []),
        ("train.save_every=2", []),
        ("rl.rewards=[exact]", None),
        ("data.options={a: 1}", ["data.options: {} -> None", "data.options.a: None -> 1"]),
    ],
)
def test_differences(change: str, expected: list[str] | None) -> None:
    found = differences(recipe(), recipe(change))
    assert found == expected if expected is not None else len(found) == 1


def test_growing_is_a_difference_when_the_schedule_ends_at_the_last_step() -> None:
    schedule = "train.schedule=cosine"
    assert differences(recipe(schedule), recipe(schedule, "train.steps=5")) == ["train.steps: 3 -> 5"]
