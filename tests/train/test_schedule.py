"""Learning-rate schedules."""

from __future__ import annotations

import math

import pytest

from hetero.errors import ArgumentError
from hetero.train.schedule import Schedule


def test_warmup_is_linear_and_ends_at_the_peak() -> None:
    schedule = Schedule(lr=1.0, warmup_steps=4)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_floor_and_stays() -> None:
    schedule = Schedule(lr=2.0, kind="linear", warmup_steps=2, total_steps=12, min_ratio=0.1)
    assert schedule(2) == 2.0
    assert schedule(7) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert schedule(12) == schedule(100) == pytest.approx(0.2)


def test_cosine_follows_the_formula() -> None:
    schedule = Schedule(lr=3.0, kind="cosine", total_steps=10)
    for step in range(11):
        assert schedule(step) == pytest.approx(1.5 * (1 + math.cos(math.pi * step / 10)), abs=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "cosin"}, "cosine"),
        ({"kind": "linear"}, "total_steps"),
        ({"lr": float("nan")}, "lr"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"total_steps": 0}, "total_steps"),
        ({"min_ratio": 2.0}, "min_ratio"),
    ],
)
def test_bad_schedules_say_what_is_expected(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Schedule(**({"lr": 1.0} | kwargs))  # type: ignore[arg-type]
