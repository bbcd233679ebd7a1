"""The prefix tree: a sequence finds its own tokens, positions and attention rows; nothing is there twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.train.prefix_tree import PrefixTree

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def build(lists: list[list[int]]) -> tuple[PrefixTree, list[np.ndarray]]:
    tree = PrefixTree()
    arrays = [np.asarray(tokens, np.int64) for tokens in lists]
    for tokens in arrays:
        before, shared = tree.num_rows, tree.shared(tokens)
        tree.insert(tokens)
        assert tree.num_rows == before + len(tokens) - shared
    return tree, arrays


@given(sequences)
def test_every_sequence_reads_itself(lists: list[list[int]]) -> None:
    tree, arrays = build(lists)
    layout = tree.layout()
    segment_of_row = np.repeat(np.arange(len(layout.kv_len)), np.diff(layout.q_start))
    for tokens in arrays:
        rows = tree.rows(tokens)
        assert np.array_equal(layout.token_ids[rows], tokens)
        assert np.array_equal(layout.positions[rows], np.arange(len(tokens)))
        for position, row in enumerate(rows):
            segment = segment_of_row[row]
            start = layout.kv_start[segment]
            query = row - layout.q_start[segment]
            length = layout.q_start[segment + 1] - layout.q_start[segment]
            assert layout.kv_len[segment] - length + query == position
            assert np.array_equal(layout.kv_rows[start : start + position + 1], rows[: position + 1])


@given(sequences)
def test_one_row_per_distinct_prefix(lists: list[list[int]]) -> None:
    tree, arrays = build(lists)
    layout = tree.layout()
    prefixes = {tuple(tokens[: n + 1]) for tokens in lists for n in range(len(tokens))}
    assert tree.num_rows == len(prefixes) == len(layout.token_ids)
    assert sorted({int(row) for tokens in arrays for row in tree.rows(tokens)}) == list(range(tree.num_rows))
    assert len(layout.kv_len) <= 2 * len(lists)
    assert layout.kv_start[-1] == len(layout.kv_rows) == layout.kv_len.sum()


def test_group_shares_its_prompt_and_groups_share_their_template() -> None:
    template, first, second = list(range(100, 130)), [1, 2, 3], [1, 9]
    tree, _ = build([template + p + c for p in (first, second) for c in ([7], [8], [7, 7])])
    assert tree.num_rows == 30 + 3 + 1 + 2 * 3


def test_layout_is_deterministic_and_follows_insertion() -> None:
    tree, _ = build([[5, 1], [3], [5, 0], [3, 3]])
    assert tree.layout().token_ids.tolist() == [5, 1, 0, 3, 3]


def test_rows_refuses_what_was_not_inserted() -> None:
    tree, _ = build([[1, 2]])
    with pytest.raises(ValueError, match="layout"):
        tree.rows(np.asarray([1, 2]))
    tree.layout()
    with pytest.raises(ValueError, match="inserted"):
        tree.rows(np.asarray([1, 3]))
