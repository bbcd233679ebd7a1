from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.data.dataset import load_dataset
from hetero.errors import RecipeError
from hetero.rl.advantages import ADVANTAGES, ZERO_SPREAD, assign_advantages, has_spread
from hetero.rl.algorithms import ALGORITHMS
from hetero.rl.task import tasks_of
from hetero.rl.trajectory import Group, Trajectory
from hetero.train.losses import LOSSES

values = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 100), st.floats(0, 1e-6))
tables = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(values, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def _brute(name: str, table: list[list[float | None]]) -> list[list[float]]:
    """The formulas, one number at a time."""
    batch = [r for row in table for r in row if r is not None]
    out = []
    for row in table:
        known = [r for r in row if r is not None]
        flat = len(known) < 2 or max(known) - min(known) <= ZERO_SPREAD
        line = []
        for i, r in enumerate(row):
            if name == "batch_norm":
                if r is None or len(batch) < 2 or max(batch) - min(batch) <= ZERO_SPREAD:
                    line.append(0.0)
                else:
                    line.append((r - statistics.fmean(batch)) / (statistics.stdev(batch) + 1e-4))
                continue
            if r is None or flat:
                line.append(0.0)
                continue
            mean = statistics.fmean(known)
            others = [x for j, x in enumerate(row) if j != i and x is not None]
            line.append(
                {
                    "group_mean": lambda r=r, mean=mean: r - mean,
                    "group_std": lambda r=r, mean=mean, known=known: (
                        (r - mean) / (statistics.stdev(known) + 1e-4)
                    ),
                    "rloo": lambda r=r, others=others: r - statistics.fmean(others),
                    "batch_std": lambda r=r, mean=mean: (r - mean) / (statistics.stdev(batch) + 1e-4),
                    "maxrl": lambda r=r, mean=mean: (r - mean) / mean,
                }[name]()
            )
        out.append(line)
    return out


@pytest.mark.parametrize("name", list(ADVANTAGES))
@given(table=tables)
def test_advantages_are_their_formulas(name, table):
    rewards = np.array([[math.nan if r is None else r for r in row] for row in table])
    before = rewards.copy()
    got = ADVANTAGES[name](rewards)
    np.testing.assert_allclose(got, _brute(name, table), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(rewards, before)
    assert got.dtype == np.float64
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "batch_norm"])
@given(table=tables)
def test_a_masked_sample_changes_nothing_for_the_others(name, table):
    rewards = np.array([[math.nan if r is None else r for r in row] for row in table])
    wider = np.concatenate([rewards, np.full((len(rewards), 1), math.nan)], axis=1)
    np.testing.assert_allclose(
        ADVANTAGES[name](wider)[:, :-1], ADVANTAGES[name](rewards), rtol=1e-9, atol=1e-12
    )
    assert not ADVANTAGES[name](wider)[:, -1].any()


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_rewards_give_exact_zeros(value, size):
    noise = np.resize([0.0, 1e-7, 2e-7], size)
    for name, function in ADVANTAGES.items():
        if name == "maxrl" and value < 0:
            continue
        assert not function(np.full((2, size), value)).any()
        if abs(value) < 1e3 and value > 0:
            assert not function(value + np.stack([noise, noise])).any()


def test_spread_and_scale():
    rewards = np.array([[0.0, 1.0], [1.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]])
    assert has_spread(rewards).tolist() == [True, False, False, False]
    assert ADVANTAGES["group_std"](rewards)[0].tolist() == pytest.approx([-0.7070, 0.7070], abs=1e-4)
    assert ADVANTAGES["rloo"](rewards)[0].tolist() == [-1.0, 1.0]
    assert ADVANTAGES["batch_norm"](rewards)[1].tolist() == pytest.approx([0.4471, 0.4471], abs=1e-4)
    with pytest.raises(RecipeError, match="none may be negative"):
        ADVANTAGES["maxrl"](np.array([[-1.0, 1.0]]))


def test_assigning_to_groups_of_different_size():
    task = tasks_of(load_dataset("arithmetic", limit=1))[0]

    def group(*rewards: float | None) -> Group:
        return Group(task, 0, [Trajectory([1], reward=r) for r in rewards])

    groups = [group(0.0, 1.0, None), group(1.0, 1.0), group(0.0, 0.0, 3.0)]
    assert assign_advantages(groups, "group_mean") == 5
    assert [t.advantage for t in groups[0].trajectories] == [-0.5, 0.5, 0.0]
    assert [t.advantage for t in groups[1].trajectories] == [0.0, 0.0]
    assert [t.advantage for t in groups[2].trajectories] == [-1.0, -1.0, 2.0]
    assert assign_advantages([group(1.0, 1.0)], "group_std") == 0
    assert assign_advantages([], "group_std") == 0


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_presets_are_made_of_parts_that_exist(name):
    preset = ALGORITHMS[name]
    assert preset.advantage in ADVANTAGES
    assert preset.loss in LOSSES
    assert preset.about
    config = preset.loss_config(max_tokens=77)
    assert (config.kind, config.aggregate) == (preset.loss, preset.aggregate)
    assert config.max_completion_tokens == (77 if preset.aggregate == "dr_grpo" else None)
    assert (config.clip_low, config.clip_high, config.kl_coef) == (
        preset.clip_low,
        preset.clip_high,
        preset.kl_coef,
    )
    own = preset.loss_config(max_tokens=77, clip_low=0.1, clip_high=0.3, kl_coef=0.5)
    assert (own.clip_low, own.clip_high, own.kl_coef) == (0.1, 0.3, 0.5)


def test_grpo_is_the_documented_default():
    config = ALGORITHMS["grpo"].loss_config(max_tokens=1)
    assert (config.clip_low, config.clip_high, config.kl_coef, config.aggregate) == (
        0.2,
        0.28,
        0.0,
        "token_mean",
    )
