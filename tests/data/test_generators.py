from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.data import load_dataset
from hetero.data.arithmetic import arithmetic
from hetero.data.instructions import instructions
from hetero.errors import DataError

RESULT = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}


@settings(deadline=None, max_examples=25)
@given(
    digits=st.integers(1, 2),
    held_out=st.floats(0.01, 0.99),
    seed=st.integers(-(2**40), 2**40),
    operations=st.lists(st.sampled_from(sorted(RESULT)), min_size=1, max_size=3),
)
def test_train_and_held_out_pairs_are_disjoint(digits, held_out, seed, operations):
    options = {"digits": digits, "held_out": held_out, "seed": seed, "operations": operations}
    train, apart = arithmetic("train", **options), arithmetic("held_out", **options)
    pairs = [{frozenset((row["a"], row["b"])) for row in rows} for rows in (train, apart)]
    assert not pairs[0] & pairs[1]
    assert train
    assert apart
    assert train == arithmetic("train", **options), "the same seed gives the same rows"
    for row in train + apart:
        assert int(row["answer"]) == RESULT[row["operation"]](row["a"], row["b"]) >= 0
        assert 10 ** (digits - 1) <= min(row["a"], row["b"]) <= max(row["a"], row["b"]) < 10**digits
    assert len({row["prompt"] for row in train + apart}) == len(train + apart)


def test_one_digit_multiplication_is_complete():
    train, apart = load_dataset("arithmetic"), load_dataset("arithmetic", split="held_out")
    assert len(train) + len(apart) == 81
    assert {(row["a"], row["b"]) for row in [*train, *apart]} == {
        (a, b) for a in range(1, 10) for b in range(1, 10)
    }
    assert train[0]["prompt"] == f"What is {train[0]['a']} times {train[0]['b']}? Reply with only the number."
    assert {row["answer"] for row in arithmetic("train", operations="*")} == {row["answer"] for row in train}


def test_seeds_and_sizes():
    assert arithmetic("held_out", seed=1) != arithmetic("held_out", seed=2)
    assert len(arithmetic("train", digits=2, size=100)) == 100
    assert len(arithmetic("train", digits=2, operations=["add", "mul"])) == 4096
    many = arithmetic("train", digits=5, size=500, operations="add")
    few = arithmetic("held_out", digits=5, size=500, operations="add", held_out=0.001)
    pairs = [{frozenset((row["a"], row["b"])) for row in rows} for rows in (many, few)]
    assert not pairs[0] & pairs[1]
    assert len(pairs[1]) >= 250


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "div"}, "add, sub, mul, got"),
        ({"operations": []}, "add, sub, mul, got"),
        ({"digits": 0}, "must be 1 to 9"),
        ({"held_out": 1.0}, "between 0 and 1"),
        ({"size": 0}, "at least 1"),
        ({"size": 1000}, "there are only"),
        ({"digits": 6, "held_out": 1e-12}, "too many to draw"),
        ({"prompt": "What is {x}?"}, "not a template"),
        ({"digits": "two"}, "cannot use these options"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(DataError, match=message):
        load_dataset("arithmetic", split="held_out", options=options)


def test_instructions_keep_topics_apart():
    train, apart = instructions("train"), instructions("held_out")
    assert not {row["topic"] for row in train} & {row["topic"] for row in apart}
    assert {row["kind"] for row in train} == {"json", "bullets", "words", "no_commas", "title"}
    assert all(row["topic"] in row["prompt"] for row in train)
    assert len({tuple(sorted(row)) for row in train + apart}) == 1, "every row has the same columns"
    assert {row["max_words"] for row in instructions("train", kinds="words")} == {8}
    with pytest.raises(DataError, match="kinds must be"):
        instructions("train", kinds="haiku")
