"""The roofline plot is well-formed and shows every case under its roof."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from hetero.bench.roofline import roofline

MACHINE = {"op": "machine", "cpu": "a <processor>", "isa": "avx2", "threads": 2, "read_gbps": 30.0}
MACHINE["peak_tflops"] = {"scalar": 0.01, "avx2": 0.2}


def case(tokens: int, intensity: float, tflops: float) -> dict[str, Any]:
    names = {"op": "moe", "shape": "x", "format": "bf16", "isa": "avx2"}
    return names | {"tokens": tokens, "flops_per_byte": intensity, "tflops": tflops}


def test_points_lie_where_they_belong() -> None:
    root = ElementTree.fromstring(roofline(MACHINE, [case(1, 1.0, 0.02), case(99, 64.0, 0.1)]))
    circles = [c for c in root.iter() if c.tag.endswith("circle") and c.get("fill-opacity")]
    (x1, y1), (x2, y2) = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in circles]
    assert x1 < x2
    assert y1 > y2
    texts = [t.text for t in root.iter() if t.tag.endswith("text")]
    assert {"1", "99", "avx2 0.2 TFLOP/s"} <= set(texts)
    assert "scalar 0.01 TFLOP/s" not in texts


def test_no_cases_is_a_roof_alone() -> None:
    root = ElementTree.fromstring(roofline(MACHINE, []))
    assert not [c for c in root.iter() if c.tag.endswith("circle")]
