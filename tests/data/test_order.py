from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.data import EpochOrder
from hetero.errors import CheckpointError, DataError


@given(st.integers(1, 40), st.integers(-5, 2**63), st.lists(st.integers(0, 30), max_size=12))
def test_every_epoch_is_a_permutation_and_any_cut_resumes(num_rows, seed, counts):
    whole = EpochOrder(num_rows, seed).take(sum(counts))
    order = EpochOrder(num_rows, seed)
    pieces = []
    for count in counts:
        state = json.loads(json.dumps(order.state_dict()))
        order = EpochOrder(num_rows, seed)
        order.load_state_dict(state)
        pieces += order.take(count)
    assert pieces == whole
    assert [draw.serial for draw in whole] == list(range(len(whole)))
    for start in range(0, len(whole) - num_rows + 1, num_rows):
        assert sorted(draw.row for draw in whole[start : start + num_rows]) == list(range(num_rows))
    assert order.epoch == sum(counts) / num_rows


def test_epochs_and_seeds_differ():
    first = [draw.row for draw in EpochOrder(50, 1).take(100)]
    assert first[:50] != first[50:]
    assert first != [draw.row for draw in EpochOrder(50, 2).take(100)]


def test_the_order_does_not_depend_on_the_version_of_anything():
    assert [draw.row for draw in EpochOrder(8, 7).take(16)] == GOLDEN


GOLDEN = [4, 1, 6, 3, 2, 7, 5, 0, 3, 1, 6, 2, 5, 4, 0, 7]


def test_other_data_or_seed_is_refused():
    state = EpochOrder(5, 1).state_dict()
    with pytest.raises(CheckpointError, match="num_rows = 5, but it is 6"):
        EpochOrder(6, 1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed = 1"):
        EpochOrder(5, 2).load_state_dict(state)
    with pytest.raises(DataError):
        EpochOrder(0)
