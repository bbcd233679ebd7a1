from __future__ import annotations

import json
import sys

import pytest

from hetero.data import Columns, Dataset, load_dataset
from hetero.errors import DataError, UnavailableError


def _jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_directories_globs_and_limits(tmp_path):
    _jsonl(tmp_path / "train.jsonl", [{"a": i} for i in range(3)])
    _jsonl(tmp_path / "test.jsonl", [{"a": 9}])
    assert [row["a"] for row in load_dataset(str(tmp_path))] == [0, 1, 2]
    assert [row["a"] for row in load_dataset(str(tmp_path), split="held_out")] == [9]
    assert [row["a"] for row in load_dataset(str(tmp_path / "*.jsonl"))] == [9, 0, 1, 2]
    assert len(load_dataset(str(tmp_path), limit=2)) == 2
    assert load_dataset(str(tmp_path / "*.jsonl"))[1:].where(0) == "train.jsonl line 1"
    with pytest.raises(DataError, match="has no file named validate"):
        load_dataset(str(tmp_path), split="validate")
    _jsonl(tmp_path / "train.json", [])
    with pytest.raises(DataError, match="several files"):
        load_dataset(str(tmp_path))


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(DataError, match=r"Did you mean arithmetic\?"):
        load_dataset("arithmetics")
    with pytest.raises(DataError, match=r"no data set 'data/train\.jsonl': no file of that name"):
        load_dataset("data/train.jsonl")


def test_options_are_checked(tmp_path):
    with pytest.raises(DataError, match="It takes: operations, digits"):
        load_dataset("arithmetic", options={"digit": 2})
    with pytest.raises(DataError, match="takes no options"):
        load_dataset(_jsonl(tmp_path / "a.jsonl", [{"a": 1}]), options={"digits": 2})
    with pytest.raises(DataError, match="splits train and held_out"):
        load_dataset("arithmetic", split="test")


def test_a_split_never_separates_equal_rows():
    rows = [({"q": str(i % 50)}, f"row {i}") for i in range(200)]
    train, apart = Dataset(rows, "d").split(0.3, seed=4)
    assert len(train) + len(apart) == 200
    assert not {row["q"] for row in train} & {row["q"] for row in apart}
    assert 20 < len(apart) < 110
    longer = Dataset([({"q": "new"}, "x"), *rows], "d").split(0.3, seed=4)[1]
    assert {row["q"] for row in apart} <= {row["q"] for row in longer}, (
        "rows added later move no row to the other side"
    )
    assert {r["q"] for r in Dataset(rows, "d").split(0.3, seed=5)[1]} != {r["q"] for r in apart}
    with pytest.raises(DataError, match="leaves the held-out side empty"):
        Dataset(rows[:1], "d").split(1e-9)


def _one(row):
    return Dataset([(row, "d.jsonl line 7")], "d")


def test_the_prompt_column_is_found_or_named():
    assert Columns().read(_one({"question": "q", "answer": 4}), 0) == ("q", {"answer": 4})
    assert Columns().read(_one({"prompt": "p", "question": "q"}), 0) == ("p", {"question": "q"})
    assert Columns(prompt="text").read(_one({"text": "t", "prompt": "p"}), 0) == ("t", {"prompt": "p"})
    row = {"a": 1, "b": {"c": [2]}, "gold": "x"}
    template = Columns(prompt="{a} and {b[c][0]}, {{braces}}?", rename={"answer": "gold"})
    assert template.read(_one(row), 0) == ("1 and 2, {braces}?", {**row, "answer": "x"})


MESSAGES = [{"role": "user", "content": "hi"}]


def test_messages_are_checked():
    assert Columns().read(_one({"messages": MESSAGES, "answer": 1}), 0) == (MESSAGES, {"answer": 1})
    for bad, message in [
        ([], "non-empty list"),
        ([{"content": "x"}], "mapping with a role"),
        ([{"role": "user", "content": [{"type": "image"}]}], "must be text"),
        ([*MESSAGES, {"role": "assistant", "content": "x"}], "nothing left to answer"),
        (3, "non-empty list"),
    ]:
        with pytest.raises(DataError, match=f"d.jsonl line 7.*{message}"):
            Columns().read(_one({"messages": bad}), 0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(), "no column named messages, prompt or question; there are quest, text"),
        (Columns(prompt="tex"), r"no column 'tex'; there are quest, text. Did you mean 'text'\?"),
        (Columns(prompt="{texd}?"), r"Did you mean 'text'\?"),
        (Columns(prompt="{text"), "template .* is not valid"),
        (Columns(prompt="{}"), "no column ''"),
        (Columns(prompt="text", rename={"answer": "gold"}), "no column 'gold'"),
        (Columns(prompt="quest"), "is empty"),
    ],
)
def test_bad_columns_say_the_line(columns, message):
    with pytest.raises(DataError, match=message):
        columns.read(_one({"quest": " ", "text": "t"}), 0)


class _Hub:
    """Stands for the package datasets."""

    @staticmethod
    def get_dataset_split_names(path, config_name):
        return ["train", "test"]

    @staticmethod
    def load_dataset(path, *, split, **options):
        if path == "no/such":
            raise ConnectionError("offline")
        return [{"question": f"{path} {split} {options}"}]


def test_the_hub_is_asked_through_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", _Hub)
    assert load_dataset("hub:openai/gsm8k", options={"name": "main"})[0]["question"].startswith(
        "openai/gsm8k train"
    )
    found = load_dataset("openai/gsm8k", split="held_out")
    assert found[0]["question"] == "openai/gsm8k test {}"
    assert found.where(0) == "openai/gsm8k[test] row 1"
    with pytest.raises(UnavailableError, match="no/such could not be had from the Hugging Face hub: offline"):
        load_dataset("no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnavailableError, match="pip install datasets"):
        load_dataset("openai/gsm8k")
