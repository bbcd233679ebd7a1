"""Charts as SVG text: no library, no network. Colours come from the page's style sheet, by class.

A chart also carries its data as an attribute; the page's script shows the values under the mouse. Without a
script it is still a chart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero.report.markup import element, text
from hetero.report.numbers import short
from hetero.report.scales import USUAL, WIDE, Axis, Paper, steps_axis, values_axis

Points = Sequence[tuple[float, float]]
_MAX_BARS = 80
_SMOOTH_FROM = 16
"""Points from which on a noisy line gets a smoothed one on top."""


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: in the legend.
        points: (step, value), in order of the steps.
        noisy: draw the points faintly and their moving mean on top, when there are many.
        dots: mark each point.
        band: (step, low, high) to shade.
    """

    name: str
    points: Points
    noisy: bool = False
    dots: bool = False
    band: Sequence[tuple[float, float, float]] = field(default_factory=list)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    low: float | None = None,
    high: float | None = None,
    note: str = "",
    wide: bool = False,
) -> str:
    """A figure with one line per series; "" when none has a point."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    paper = WIDE if wide else USUAL
    x = steps_axis((step for one in drawn for step, _ in one.points), paper)
    edges = [edge for one in drawn for _, *pair in one.band for edge in pair]
    y = values_axis([*edges, *(value for one in drawn for _, value in one.points)], paper, low, high)
    shapes = [_grid(y, paper), _step_labels(x, paper)]
    shapes += [_band(one, x, y, color) for color, one in enumerate(drawn) if one.band]
    shapes += [_line(one, x, y, color) for color, one in enumerate(drawn)]
    last = drawn[0].points[-1][1]
    return _figure(title, short(last), drawn, "".join(shapes), x, paper, note)


def bar_chart(title: str, series: Sequence[Series], *, unit: str = "", note: str = "") -> str:
    """A figure of stacked bars, one per step (per few steps when there are many); "" without a point."""
    drawn = [one for one in series if any(value > 0 for _, value in one.points)]
    if not drawn:
        return ""
    steps = sorted({step for one in drawn for step, _ in one.points})
    size = -(-len(steps) // _MAX_BARS)
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    tables = [dict(one.points) for one in drawn]
    heights = [[sum(t.get(step, 0.0) for step in part) / len(part) for t in tables] for part in bins]
    x = Axis(0.0, float(len(bins)), *USUAL.across)
    y = values_axis([sum(column) for column in heights], USUAL, low=0.0)
    labels = Axis(steps[0] - 0.5, steps[0] - 0.5 + len(bins) * size, *USUAL.across)
    width = min((x.end - x.start) / len(bins) * 0.78, 28.0)
    shapes = [_grid(y, USUAL), _step_labels(labels, USUAL)]
    for index, column in enumerate(heights):
        foot, left = 0.0, x.place(index + 0.5) - width / 2
        for color, value in enumerate(column):
            top = y.place(foot + value)
            tall = y.place(foot) - top
            shapes.append(element("rect", class_=f"bar c{color}", x=left, y=top, width=width, height=tall))
            foot += value
    mean = sum(map(sum, heights)) / len(heights)
    return _figure(title, f"{short(mean)}{unit}", drawn, "".join(shapes), labels, USUAL, note)


def sparkline(values: Sequence[float], width: float = 96, height: float = 22) -> str:
    """A line without axes, with 0 on it, for beside a number."""
    if len(values) < 2:
        return ""
    x = Axis(0.0, len(values) - 1.0, 2.0, width - 2)
    low, high = min(0.0, *values), max(0.0, *values)
    y = Axis(low, high if high > low else 1.0, height - 3, 3.0)
    line = element("polyline", points=_path([(x.place(i), y.place(value)) for i, value in enumerate(values)]))
    size = {"viewBox": f"0 0 {width:g} {height:g}", "width": width, "height": height}
    return element("svg", line, class_="spark", aria_hidden="true", **size)


def _figure(
    title: str, value: str, series: Sequence[Series], shapes: str, x: Axis, paper: Paper, note: str
) -> str:
    bottom, top = paper.upward
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "width": paper.width,
        "series": [
            {"name": one.name, "points": [[s, float(f"{v:.6g}")] for s, v in one.points]} for one in series
        ],
    }
    first, last = series[0].points[0], series[0].points[-1]
    keys = [element("span", text(one.name), class_=f"key c{color}") for color, one in enumerate(series)]
    cursor = element("line", class_="cursor", y1=top, y2=bottom, visibility="hidden")
    label = f"{title}: {short(first[1])} at step {first[0]:g}, {short(last[1])} at step {last[0]:g}"
    drawing = {
        "viewBox": f"0 0 {paper.width:g} {paper.height:g}",
        "role": "img",
        "aria_label": label,
    }
    return element(
        "figure",
        element("figcaption", _span("title", title), _span("value", value)),
        element("div", *keys, class_="legend") if len(keys) > 1 else "",
        element("svg", shapes, cursor, **drawing),
        element("p", text(note), class_="note") if note else "",
        class_="card chart wide" if paper is WIDE else "card chart",
        data_chart=json.dumps(data, separators=(",", ":")),
    )


def _span(kind: str, inside: str) -> str:
    return element("span", text(inside), class_=kind)


def _grid(y: Axis, paper: Paper) -> str:
    left, right = paper.across
    parts = []
    for tick in y.ticks():
        at = y.place(tick)
        parts.append(element("line", class_="grid", x1=left, x2=right, y1=at, y2=at))
        parts.append(_tick(_label(tick, y), left - 7, at + 4, "end"))
    return "".join(parts)


def _tick(label: str, x: float, y: float, anchor: str) -> str:
    return element("text", text(label), class_="tick", x=x, y=y, text_anchor=anchor)


def _label(tick: float, axis: Axis) -> str:
    return "0" if abs(tick) < 1e-9 * (axis.high - axis.low) else short(float(f"{tick:.6g}"))


def _step_labels(x: Axis, paper: Paper) -> str:
    ticks = sorted({round(tick) for tick in x.ticks(6) if x.low <= round(tick) <= x.high})
    return "".join(_tick(str(tick), x.place(tick), paper.height - 7, "middle") for tick in ticks)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _line(series: Series, x: Axis, y: Axis, color: int) -> str:
    def line(points: Points, kind: str) -> str:
        places = [(x.place(step), y.place(value)) for step, value in points]
        return element("polyline", class_=f"{kind} c{color}", points=_path(places))

    parts = []
    if series.noisy and len(series.points) >= _SMOOTH_FROM:
        parts += [line(series.points, "line faint"), line(_smoothed(series.points), "line")]
    else:
        parts.append(line(series.points, "line"))
    if series.dots or len(series.points) == 1:
        for step, value in series.points:
            parts.append(
                element("circle", class_=f"dot c{color}", cx=x.place(step), cy=y.place(value), r=3.5)
            )
    return "".join(parts)


def _band(series: Series, x: Axis, y: Axis, color: int) -> str:
    there = [(x.place(step), y.place(top)) for step, _, top in series.band]
    back = [(x.place(step), y.place(bottom)) for step, bottom, _ in reversed(series.band)]
    return element("polygon", class_=f"band c{color}", points=_path([*there, *back]))


def _smoothed(points: Points) -> list[tuple[float, float]]:
    """Moving mean over about a tenth of the points, narrower at the ends so that these are not flattened."""
    half = max(1, len(points) // 20)
    found = []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        window = [value for _, value in points[i - reach : i + reach + 1]]
        found.append((step, sum(window) / len(window)))
    return found
