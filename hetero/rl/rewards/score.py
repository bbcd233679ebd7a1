"""What the reward functions said about one completion, and whether too many of them failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero.errors import RewardError


@dataclass(frozen=True)
class Failure:
    """A reward function that gave no number.

    Attributes:
        reward: name of the function.
        kind: "exception", "timeout", "crash" (its process ended), "nonfinite" (NaN or infinite),
            "bad_result".
        message: a traceback or a sentence.
    """

    reward: str
    kind: str
    message: str


@dataclass
class Score:
    """The rewards of one completion.

    Attributes:
        values: function name -> its reward, None where it does not apply or failed.
        parts: "<function>/<part>" -> further numbers that functions returned in dicts.
        failures: functions that failed.
        total: weighted sum of the values; None masks the sample: a function failed, or none applies.
    """

    values: dict[str, float | None] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    total: float | None = None

    def close(self, weights: dict[str, float]) -> None:
        """Set `total` once all values are there, and put everything in an order that does not depend on
        which came first.

        A partial sum after a failure would be a wrong reward, so there is none then.
        """
        self.values = {name: self.values[name] for name in weights}
        self.parts = dict(sorted(self.parts.items()))
        self.failures.sort(key=lambda failure: list(weights).index(failure.reward))
        given = {name: value for name, value in self.values.items() if value is not None}
        if given and not self.failures:
            self.total = sum(weights[name] * value for name, value in given.items())


def check_failures(scores: Sequence[Score], max_fraction: float) -> None:
    """Raise RewardError when the reward functions failed on more than `max_fraction` of the samples."""
    failed = [score for score in scores if score.failures]
    if not scores or len(failed) <= max_fraction * len(scores):
        return
    kinds = Counter((failure.reward, failure.kind) for score in failed for failure in score.failures)
    listed = ", ".join(f"{reward} {count} x {kind}" for (reward, kind), count in kinds.most_common())
    first = failed[0].failures[0]
    raise RewardError(
        f"Reward functions failed on {len(failed)} of {len(scores)} samples "
        f"({len(failed) / len(scores):.0%}), more than the "
        f"{max_fraction:.0%} that may fail: {listed}. This step is dropped and finished steps are kept: fix "
        "the function, then "
        f"resume. The first failure was in {first.reward}: {first.message}"
    )
