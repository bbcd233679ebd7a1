from __future__ import annotations

import dataclasses

import pytest

from hetero.engine import SamplingParams
from hetero.engine.params import parse_bytes
from hetero.errors import ArgumentError, HeteroError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("stop", ("a", "")),
        ("stop_ids", (-1,)),
        ("stop_ids", ("a",)),
        ("temperature", "hot"),
        ("top_p", None),
        ("max_tokens", 1.5),
        ("top_k", "5"),
        ("seed", 0.5),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"SamplingParams\.{name} is .*expected") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, HeteroError)
    assert isinstance(caught.value, ValueError)


def test_lists_and_a_single_string_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_ids=[3, 4])
    assert params.stop == ("END",)
    assert params.stop_ids == (3, 4)
    assert hash(params) == hash(dataclasses.replace(params))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1GiB", 1 << 30),
        ("1.5 KiB", 1536),
        ("2MB", 2_000_000),
        ("3TiB", 3 << 40),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GiB", "1 gigabyte", "-1GiB", "1Gi"])
def test_not_a_size(size: str) -> None:
    with pytest.raises(ArgumentError, match="is not a size"):
        parse_bytes(size)
