from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero.report.charts import Series, bar_chart, line_chart, sparkline
from hetero.report.numbers import duration, fixed, short, visible
from hetero.report.scales import USUAL, round_step, steps_axis, values_axis

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(numbers, min_size=1, max_size=20), st.sampled_from([None, 0.0]))
def test_every_value_lies_on_the_paper_and_ticks_are_round(values, low):
    if low is not None:
        values = [abs(value) for value in values]
    axis = values_axis(values, USUAL, low)
    bottom, top = USUAL.upward
    assert axis.low < axis.high
    for value in values:
        assert top - 1e-6 <= axis.place(value) <= bottom + 1e-6
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 7
    for one, other in pairwise(ticks):
        assert axis.place(one) > axis.place(other)


@given(st.floats(1e-30, 1e30))
def test_steps_between_ticks_are_round(rough):
    step = round_step(rough)
    assert rough * (1 - 1e-6) <= step <= 2.5 * rough
    leading = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(leading - nice) for nice in (1, 2, 2.5, 5, 10)) < 1e-6


def test_one_step_stands_in_the_middle():
    axis = steps_axis([7.0], USUAL)
    assert axis.place(7.0) == sum(USUAL.across) / 2


@settings(max_examples=300)
@example([(0, -1e38), (1, -1e38)])
@example([(0, 5e-324), (1, 0.0)])
@given(st.lists(st.tuples(st.integers(0, 500), numbers), min_size=1, max_size=40))
def test_charts_of_any_numbers_are_finite(pairs):
    points = sorted(dict(pairs).items())
    for drawing in (
        line_chart("t", [Series("a", points, noisy=True, dots=True), Series("b", points[:1])]),
        bar_chart("t", [Series("a", [(s, abs(v)) for s, v in points])]),
        sparkline([v for _, v in points]),
    ):
        places = re.findall(r' (?:points|x|y|cx|cy|x1|x2|y1|y2|height|width)="([^"]*)"', drawing)
        assert all(math.isfinite(float(n)) for place in places for n in re.split("[ ,]", place) if n)


def test_nothing_to_draw_is_no_chart():
    assert (
        line_chart("t", [])
        == line_chart("t", [Series("a", [])])
        == bar_chart("t", [Series("a", [(1, 0.0)])])
        == ""
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.12345, "0.123"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (12345, "12.3k"),
        (4.56e6, "4.56M"),
        (7e9, "7G"),
        (1.2e-5, "1.2e-05"),
        (-0.5, "-0.5"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_durations_and_fixed():
    assert [duration(s) for s in (0.04, 12.34, 65, 3723)] == ["0.0 s", "12.3 s", "1:05", "1:02:03"]
    assert [fixed(x) for x in (0.5, None, math.inf)] == ["0.500", "-", "-"]


def test_texts_cannot_command_a_terminal():
    assert visible("a\x1b[31mred\x07\r\nb\tc\u202ed\u200b") == "a␛[31mred·· ⏎ b c·d·"
    assert visible("x" * 50, 10) == "x" * 9 + "…"
    assert visible("  grüße, 你好 🎉 ") == "grüße, 你好 🎉"
