from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.data import load_dataset
from hetero.rl.rewards import REWARDS
from hetero.rl.rewards.answers import numbers


def _mark(name: str, completion: object, **columns: object):
    return REWARDS[name](prompts=["p"], completions=[completion], **columns)[0]


@pytest.mark.parametrize(
    ("reply", "answer", "mark"),
    [
        ("56", "56", 1),
        ("7 times 8 is 56.", 56, 1),
        ("7 + 7 = 14", "14.0", 1),
        ("= **1,234**!", "1234", 1),
        ("$1,234.50", 1234.5, 1),
        ("-5", "-5", 1),
        ("\u22125 degrees", -5, 1),
        ("between 10-15", "15", 1),
        ("5, 6", "6", 1),
        ("56 or 57", "56", 0),
        ("none", "56", 0),
        ("", "56", 0),
        ("x56", "56", 0),
        ("56px", "56", 1),
        ("1.5e3", 1500, 1),
        ("\uff15\uff16", "56", 1),
        (".5", "0.5", 1),
        ("3.14", "3.141", 0),
        ("So he had 72.\n#### 72", "48+24 = <<48+24=72>>72\n#### 72", 1),
        ("9" * 10_000, "9", 0),
        ("1e999999999", "1", 0),
        (f"{'1,' * 5000}7", "7", 1),
        ("56", None, None),
    ],
)
def test_last_number(reply, answer, mark):
    assert _mark("last_number", reply, answer=[answer]) == mark
    messages = [{"role": "assistant", "content": reply}]
    assert _mark("last_number", messages, answer=[answer]) == mark


def test_last_number_tolerance_and_bad_answers():
    assert _mark("last_number", "3.14", answer=["3.141"], tolerance=1e-3) == 1
    assert _mark("last_number", "3.14", answer=["3.2"], tolerance=1e-3) == 0
    with pytest.raises(ValueError, match="holds no number"):
        _mark("last_number", "3", answer=["three"])


@given(
    st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=5),
    st.sampled_from([" ", ", ", " = ", "\n"]),
)
def test_numbers_in_text_are_all_found(values, separator):
    assert numbers(separator.join(map(str, values))) == values
    assert numbers(separator.join(f"{value:,}" for value in values)) == values


@given(st.text(alphabet="0123456789.,-+eE x", max_size=60))
def test_any_text_has_numbers_or_none(text):
    assert all(number is None or abs(number) >= 0 for number in numbers(text))


@pytest.mark.parametrize(
    ("name", "reply", "columns", "mark"),
    [
        ("exact", " Paris\n", {"answer": ["Paris"]}, 1),
        ("exact", "paris", {"answer": ["Paris"]}, 0),
        ("exact", "paris", {"answer": ["Paris"], "ignore_case": True}, 1),
        ("exact", "It is Paris", {"answer": ["Paris"]}, 0),
        ("exact", "5", {"answer": [5]}, 1),
        ("contains", "It is paris.", {"answer": ["Paris"]}, 1),
        ("contains", "comparison", {"answer": ["paris"]}, 0),
        ("contains", "x", {"answer": [None]}, None),
        ("choice", "The answer is (B).", {"answer": ["B"]}, 1),
        ("choice", "A or B: B", {"answer": ["(a)"]}, 0),
        ("choice", "A dog", {"answer": ["D"]}, 0),
        ("choice", "", {"answer": ["A"]}, 0),
        ("choice", "C. I'm sure", {"answer": ["C"]}, 1),
        ("regex", "abc 123", {"pattern": r"\d{3}"}, 1),
        ("regex", "abc 12", {"pattern": r"\d{3}"}, 0),
        ("regex", "a\nb", {"pattern": r"\Aa.b\Z"}, 1),
        ("regex", "a", {"pattern": ["b"]}, 0),
        ("number_only", " 56\n", {}, 1),
        ("number_only", "-1,234.5", {}, 1),
        ("number_only", "56.", {}, 0),
        ("number_only", "It is 56", {}, 0),
        ("number_only", "5 6", {}, 0),
        ("number_only", "", {}, 0),
        ("json_keys", '{"name": "x", "color": 1}', {"keys": ["name", "color"]}, 1),
        ("json_keys", '{"name": "x", "color": 1}', {"keys": [["color", "name"]]}, 1),
        ("json_keys", '{"name": "x"}', {"keys": ["name", "color"]}, 0),
        ("json_keys", '{"name": 1, "color": 1, "size": 2}', {"keys": ["name", "color"]}, 0),
        ("json_keys", '```json\n{"name": 1}\n```', {"keys": ["name"]}, 0),
        ("json_keys", '["name"]', {"keys": ["name"]}, 0),
        ("json_keys", "[" * 100_000, {"keys": ["name"]}, 0),
        ("json_keys", "x", {"keys": [None]}, None),
        ("max_words", "one two three", {"max_words": 3}, 1),
        ("max_words", "one two three", {"max_words": [2]}, 0),
        ("max_words", " ", {"max_words": 3}, 0),
        ("max_words", "x", {"max_words": [None]}, None),
        ("bullets", "Facts:\n* a\n  * b\n* c", {"num_bullets": 3}, 1),
        ("bullets", "* a\n* b\n* c\n* d", {"num_bullets": [3]}, 0),
        ("bullets", "* a\n*\n* c", {"num_bullets": 3}, 0),
        ("bullets", "- a", {"num_bullets": 1, "marker": "- "}, 1),
        ("no_commas", "One. Two!", {}, 1),
        ("no_commas", "One. Two!", {"num_sentences": 2}, 1),
        ("no_commas", "One. Two! Three", {"num_sentences": 3}, 0),
        ("no_commas", "One, two.", {}, 0),
        ("no_commas", "", {}, 0),
        ("title", "<<Poem of joy>>\nLine", {}, 1),
        ("title", "<< >>", {}, 0),
        ("title", "<Poem>", {}, 0),
        ("tags", "<think>a\nb</think>\n<answer>4</answer>", {}, 1),
        ("tags", "<think>a</think><answer></answer>", {}, 0),
        ("tags", "<answer>4</answer><think>a</think>", {}, 0),
        ("tags", "so <think>a</think><answer>4</answer>", {}, 0),
        ("tags", "<think>a<think>b</think></think><answer>4</answer>", {}, 0),
        ("tags", "<a>x</a>", {"tags": ["a"]}, 1),
        (
            "instruction",
            "a b",
            {"kind": ["words"], "max_words": [2], "keys": [None], "num_bullets": [None]},
            1,
        ),
        ("instruction", "a, b", {"kind": ["no_commas"]}, 0),
        ("instruction", "a", {"kind": [None]}, None),
    ],
)
def test_marks(name, reply, columns, mark):
    assert _mark(name, reply, **columns) == mark


def test_soft_overlong():
    def penalty(length, **options):
        return REWARDS["soft_overlong"](completions=["x"], completion_ids=[[0] * length], **options)[0]

    assert [penalty(n, max_tokens=100, buffer=20) for n in (0, 80, 90, 100, 120)] == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="buffer is 0"):
        penalty(1, max_tokens=10, buffer=0)


def test_every_builtin_is_documented_and_takes_columns():
    for name, function in REWARDS.items():
        assert function.__name__ == name
        assert function.__doc__
        assert len(function.__doc__) > 40


def test_the_generated_instructions_can_all_be_fulfilled():
    replies = {
        "json": '{"name": "x", "color": "red"}',
        "bullets": "* a\n* b\n* c",
        "words": "Small and red",
        "no_commas": "It is red. It is small.",
        "title": "<<Ode>>",
    }
    for row in load_dataset("instructions"):
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        good = replies[row["kind"]]
        assert _mark("instruction", good, **columns) == 1.0
        assert _mark("instruction", "Certainly, here is my very long answer, " * 3, **columns) == 0.0
