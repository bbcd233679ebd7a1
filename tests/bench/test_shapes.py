"""Shapes by name and by numbers, and who is routed where."""

from __future__ import annotations

from collections import Counter

import pytest

from hetero.bench import memory, shapes
from hetero.bench.routing import calls_to_see_all, deal
from hetero.errors import ArgumentError, CapacityError


def test_numbers_give_the_named_shape() -> None:
    named = shapes.moe_shape("qwen3-30b-a3b")
    assert shapes.moe_shape("E=128, top_k=8, hidden=2048, intermediate=768") == named
    assert named.weights == 3 * 2048 * 768
    assert shapes.linear_shapes("mixtral-8x7b/o_proj") == {
        "mixtral-8x7b/o_proj": shapes.LinearShape(4096, 4096)
    }
    assert shapes.attention_shape("heads=4,kv_heads=2,dim=64,window=7").window == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qwen3-30b", "did you mean 'qwen3-30b-a3b'"),
        ("E=8,top_k=2,hidden=64", "lacks intermediate"),
        ("E=8,top_k=0,hidden=64,intermediate=32", "top_k in the shape .* is '0'"),
        ("E=8,top_k=9,hidden=64,intermediate=32", "top_k is at most E"),
        ("E=8,topk=2", "'topk' in the shape .* is unknown; a shape has E, top_k, hidden, intermediate"),
    ],
)
def test_a_wrong_shape_is_explained(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shapes.moe_shape(text)


def test_an_unknown_linear_lists_the_known() -> None:
    with pytest.raises(ArgumentError, match="has no linear 'z_proj'; it has q_proj, k_proj"):
        shapes.linear_shapes("quickstart/z_proj")


def test_cards_are_dealt_once_before_twice() -> None:
    calls = deal(2, 3, 13, calls_to_see_all(2, 3, 13, at_least=2))
    assert [call.shape for call in calls] == [(2, 3)] * 2
    seen = Counter(expert for call in calls for expert in call.flatten().tolist())
    assert len(seen) == 12
    assert set(seen.values()) == {1}
    for hand in deal(50, 3, 5, 2)[1].tolist():
        assert len(set(hand)) == 3


def test_copies_fit_the_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert memory.num_copies(100, 0, at_least=250) == 3
    assert memory.num_copies(100, 500, at_least=1000) == 2
    assert memory.num_copies(100, 0, at_least=0) == 1
    with pytest.raises(CapacityError, match="fewer experts"):
        memory.num_copies(100, 650, at_least=1)
