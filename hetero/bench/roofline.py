"""A roofline plot as SVG: what the machine allows at every intensity, and where each case stands."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 50, 60
COLORS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#57606a", "#9a6700", "#0a7b83")


class _Axis:
    """A logarithmic scale over whole decades."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        self.start, self.end = start, end

    @property
    def bounds(self) -> tuple[float, float]:
        return 10.0 ** self.decades[0], 10.0 ** self.decades[-1]

    def __call__(self, value: float) -> float:
        first, last = self.decades[0], self.decades[-1]
        part = (math.log10(value) - first) / (last - first)
        return self.start + part * (self.end - self.start)


def roofline(machine: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    """SVG text.

    Args:
        machine: the machine's record: {read_gbps, peak_tflops, cpu, threads}.
        cases: records with flops_per_byte, tflops, op, shape, format, isa and tokens; others are left out.
    """
    points = [case for case in cases if case.get("flops_per_byte") and case.get("tflops")]
    gbps, peaks = machine["read_gbps"], machine["peak_tflops"]
    used = {case["isa"] for case in points} & set(peaks) or set(peaks)
    intensities = [case["flops_per_byte"] for case in points]
    ridges = [1e3 * peaks[isa] / gbps for isa in used]
    speeds = [case["tflops"] for case in points]
    xs = _Axis(min([*intensities, *ridges]) / 2, max([*intensities, *ridges]) * 2, LEFT, WIDTH - RIGHT)
    ys = _Axis(
        min([*speeds, xs.bounds[0] * gbps / 1e3]), max(peaks[i] for i in used) * 1.2, HEIGHT - BOTTOM, TOP
    )
    parts = [
        *_grid(xs, ys),
        *_roof(xs, ys, gbps, {isa: peaks[isa] for isa in used}),
        *_points(xs, ys, points),
    ]
    title = f"{machine['cpu']}, {machine['threads']} threads: {gbps:.1f} GB/s"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="#24292f">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        f"{_text(LEFT, 28, title, size=15)}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _grid(xs: _Axis, ys: _Axis) -> list[str]:
    parts = []
    for decade in xs.decades:
        x = xs(10.0**decade)
        parts.append(_line(x, ys.start, x, ys.end, "#eaeef2"))
        parts.append(_text(x, ys.start + 18, f"{10.0**decade:g}", "middle"))
    for decade in ys.decades:
        y = ys(10.0**decade)
        parts.append(_line(xs.start, y, xs.end, y, "#eaeef2"))
        parts.append(_text(xs.start - 8, y + 4, f"{10.0**decade:g}", "end"))
    middle = (xs.start + xs.end) / 2
    parts.append(_text(middle, HEIGHT - 16, "operations per byte of weights read", "middle"))
    turn = f'transform="rotate(-90 18 {(ys.start + ys.end) / 2:.1f})"'
    parts.append(_text(18, (ys.start + ys.end) / 2, "TFLOP/s", "middle", extra=turn))
    return parts


def _roof(xs: _Axis, ys: _Axis, gbps: float, peaks: dict[str, float]) -> list[str]:
    parts = []
    top = max(peaks.values())
    ridge = min(1e3 * top / gbps, xs.bounds[1])
    low = xs.bounds[0]
    parts.append(_line(xs(low), ys(low * gbps / 1e3), xs(ridge), ys(ridge * gbps / 1e3), "#24292f", 2))
    for isa, peak in peaks.items():
        start = min(1e3 * peak / gbps, xs.bounds[1])
        parts.append(_line(xs(start), ys(peak), xs.end, ys(peak), "#24292f", 2))
        parts.append(_text(xs.end - 6, ys(peak) - 6, f"{isa} {peak:.3g} TFLOP/s", "end"))
    return parts


def _points(xs: _Axis, ys: _Axis, points: Sequence[dict[str, Any]]) -> list[str]:
    parts: list[str] = []
    series: dict[str, list[dict[str, Any]]] = {}
    for case in points:
        name = " ".join([case["op"], case["shape"], case["format"], case["isa"]])
        series.setdefault(name + (" backward" if case.get("backward") else ""), []).append(case)
    for index, (name, cases) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        y = TOP + 20 + 46 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 18}" cy="{y - 4}" r="5" fill="{color}"/>')
        words = name.split(" ", 2)
        for row, word in enumerate(words):
            parts.append(_text(WIDTH - RIGHT + 30, y + 13 * row, word))
        labels: dict[tuple[int, int], list[str]] = {}  # those of points that touch stand side by side
        for case in cases:
            x, y_case = xs(case["flops_per_byte"]), ys(case["tflops"])
            parts.append(f'<circle cx="{x:.1f}" cy="{y_case:.1f}" r="5" fill="{color}" fill-opacity="0.85"/>')
            near = (at for at in labels if abs(at[0] - x) < 16 and abs(at[1] - y_case) < 13)
            labels.setdefault(next(near, (round(x), round(y_case))), []).append(str(case["tokens"]))
        parts += [_text(x + 8, y + 14, ", ".join(tokens)) for (x, y), tokens in labels.items()]
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: int = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", *, size: int = 12, extra: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {extra}'
    return f"<text {place.strip()}>{html.escape(text)}</text>"
