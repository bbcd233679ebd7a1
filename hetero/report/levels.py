"""Which values of the agreement metrics are fine, doubtful or bad, and the table that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hetero.report.markup import element, text
from hetero.report.numbers import short
from hetero.report.run_files import Run

Level = Literal["good", "warn", "bad"]


@dataclass(frozen=True)
class Watched:
    """A metric with limits.

    Attributes:
        metric: its name.
        about: what it is, and what is wrong outside the limits.
        level: of a value; the second argument says whether sampler and trainer share exact kernels.
        distance: the larger, the worse: of the run's values the worst is shown.
    """

    metric: str
    about: str
    level: Callable[[float, bool], Level]
    distance: Callable[[float], float] = float


def _share(value: float, exact: bool) -> Level:
    return "bad" if value < 0.3 else "warn" if value < 0.5 else "good"


def _ratio(value: float, exact: bool) -> Level:
    return "good" if 0.5 <= value <= 2 else "bad"


def _kl(value: float, exact: bool) -> Level:
    if exact and value > 0:
        return "bad"
    return "bad" if value > 1e-2 else "warn" if value > 1e-3 else "good"


def _stale_kl(value: float, exact: bool) -> Level:
    return _kl(value, False)


def _error(value: float, exact: bool) -> Level:
    return "bad" if value > 1.02 else "good"


def _whole(value: float, exact: bool) -> Level:
    return "good" if value == 1 else "bad"


def _none(value: float, exact: bool) -> Level:
    return "good" if value == 0 else "bad"


def _below(value: float) -> float:
    return -value


def _from_one(value: float) -> float:
    return max(value, 1 / value) if value > 0 else float("inf")


WATCHED = (
    Watched("mismatch/kl_k3", "KL of sampler and trainer: over 0.001 is doubtful, over 0.01 bad", _kl),
    Watched("mismatch/ess", "effective sample size of the mismatch: under 0.5, 0.3", _share, _below),
    Watched("mismatch/is_mean", "mean ratio of trainer to sampler: outside 0.5 to 2", _ratio, _from_one),
    Watched("mismatch/token_mult_prob_error", "mean factor between the two: over 1.02", _error),
    Watched("off_policy/kl_k3", "KL from the policy that sampled: over 0.001, 0.01", _stale_kl),
    Watched("off_policy/ess", "effective sample size of older samples: under 0.5, 0.3", _share, _below),
    Watched(
        "off_policy/ratio_mean", "mean ratio to the sampling policy: outside 0.5 to 2", _ratio, _from_one
    ),
    Watched("off_policy/mixed_version_traj", "answers by several versions: any", _none),
    Watched("kv/stale_refused", "cache lookups under weights that are gone: any", _none),
    Watched("weights/base_hash_ok", "base weights unchanged: 0 is a bug or broken memory", _whole, _below),
)
"""Limits from practice: effective sample size, mean ratio and KL as usual for bf16; on exact kernels any
difference between sampler and trainer is a bug."""


def worst(run: Run) -> Iterator[tuple[Watched, float, float, Level]]:
    """(metric, step, value, level) of the worst step of each, where the run has it."""
    exact = any(value == 0 for _, value in run.series("mismatch/logp_abs_max"))
    for watched in WATCHED:
        values = run.series(watched.metric)
        if values:
            step, value = max(values, key=lambda point: watched.distance(point[1]))
            yield watched, step, value, watched.level(value, exact)


def levels_section(run: Run) -> str:
    """The table, worst first; "" without any of the metrics."""
    found = sorted(worst(run), key=lambda row: ("bad", "warn", "good").index(row[3]))
    if not found:
        return ""
    rows = [
        element(
            "tr",
            element("td", element("b", text(short(value)), class_=level)),
            element("td", text(watched.metric)),
            element("td", text(watched.about)),
            element("td", text(f"step {step:g}")),
        )
        for watched, step, value, level in found
    ]
    title = element("h2", "Agreement, worst step of each")
    return element("section", title, element("table", *rows), class_="card levels")
