"""Timing of calls that rotate over their operands, and the check that goes before it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.errors import WrongResultError

TOLERANCE = 0.02
"""Largest relative error of a row against the fp32 reference: several times what bf16 rounding of
intermediates gives, far less than one wrong weight block, row or expert."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a call is timed: at least `repeats` times and for `seconds`, but at most `most` times."""

    repeats: int = 5
    seconds: float = 1.0
    most: int = 1000


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of every timed call, in order."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_record(self) -> dict[str, float | int]:
        return {
            "ms": 1e3 * self.median,
            "ms_min": 1e3 * min(self.seconds),
            "ms_max": 1e3 * max(self.seconds),
            "repeats": len(self.seconds),
        }


def time_calls(call: Callable[[int], object], budget: Budget, *, first: int = 0, warm_up: int = 2) -> Times:
    """Seconds of call(first), call(first + 1), ..., after some that are not timed: the number tells the call
    which operands are next."""
    for i in range(warm_up):
        call(first + i)
    seconds: list[float] = []
    while len(seconds) < budget.repeats or sum(seconds) < budget.seconds:
        start = time.perf_counter()
        call(first + warm_up + len(seconds))
        seconds.append(time.perf_counter() - start)
        if len(seconds) >= budget.most:
            break
    return Times(seconds)


def check(
    what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE, floor: float = 1e-30
) -> None:
    """Compare row by row of the last axis; `floor` is the least norm that an error is measured against, for
    rows that are zero but for rounding.

    Raises:
        WrongResultError: a row is further from the reference than `tolerance` of its norm, or not finite.
    """
    got, want = got.detach().double(), want.detach().double()
    # A row may be small by cancellation: a tenth of the typical row is what its error is measured against.
    typical = want.norm(dim=-1).square().mean().sqrt()
    scale = want.norm(dim=-1).clamp(min=0.1 * float(typical)).clamp(min=floor)
    error = ((got - want).norm(dim=-1) / scale).max()
    if not bool(error <= tolerance):  # also when it is NaN
        raise WrongResultError(
            f"{what} differs from hetero.kernels.reference by {float(error):.3g} of a row's norm, more than "
            f"{tolerance:g}; nothing is timed. Please report this with the output of `hetero bench machine`."
        )


def time_pairs(
    ours: Callable[[int], object],
    peer: Callable[[int], object],
    budget: Budget,
    threads: int,
    name: str,
    pause: float = 0.02,
) -> tuple[Times, dict[str, object]]:
    """Time both in turn, block by block, PyTorch with `threads` threads for the peer and one for us.

    Before our turn we wait `pause` seconds, in which the peer's idle threads spin (PyTorch's for 10 ms).

    Returns:
        Our times, and {peer, peer_ms, ratio, ratio_min, ratio_max}: seconds of the peer over ours, the median
        and the extremes over the pairs of blocks.
    """
    before = torch.get_num_threads()
    block = Budget(repeats=1, seconds=budget.seconds / max(1, budget.repeats), most=budget.most)
    mine: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    try:
        for pair in range(budget.repeats):
            torch.set_num_threads(1)
            time.sleep(pause)
            first = time_calls(ours, block, first=len(mine) + pair)
            torch.set_num_threads(threads)
            second = time_calls(peer, block, first=len(theirs) + pair)
            mine += first.seconds
            theirs += second.seconds
            ratios.append(second.median / first.median)
    finally:
        torch.set_num_threads(before)
    return Times(mine), {
        "peer": name,
        "peer_ms": 1e3 * statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
