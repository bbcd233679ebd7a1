"""The trainer's end of the reward processes: submit completions as they come, gather their scores."""

from __future__ import annotations

import difflib
import logging
import pickle
import sys
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hetero.errors import RewardError
from hetero.rl.rewards.link import Link
from hetero.rl.rewards.score import Failure, Score, check_failures
from hetero.rl.rewards.spec import RewardSpec, as_spec, labels, target

_WATCH = 60.0
"""Seconds of silence after which a line says what is being waited for."""
_log = logging.getLogger(__name__)

Completion = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One completion to be scored, as reward functions see it.

    Attributes:
        prompt, completion: text for a prompt that the data set gave as text, messages for one it gave as
            messages.
        completion_ids: the sampled token ids.
        columns: the other columns of the data set's row.
        step: optimiser step, `trainer_state.global_step` for functions that ask.
        group: completions of one prompt share it; None for one that stands alone.
        group_size: how many there are of them.
    """

    prompt: Completion
    completion: Completion
    columns: Mapping[str, Any]
    completion_ids: Sequence[int] = ()
    step: int = 0
    group: Hashable = None
    group_size: int = 1


MAX_FAILED = 0.2
"""Share of the samples of a step that may fail, unless a caller says another."""


class RewardPool:
    """Runs reward functions in worker processes.

    The functions have TRL's signature, `reward(prompts, completions, **columns) -> list[float | None]`,
    called by keyword; a function gets those of prompts, completions, completion_ids, trainer_state (only
    `global_step`), log_metric, log_extra and the data set's columns that it names, or all if it takes
    **kwargs. Entries may also be dicts {"reward": number,
    other: number}, whose other numbers are logged. `async def` functions wait for each other's answers
        together.

    A call that raises, returns nonsense, is not finite, takes longer than `timeout` seconds or takes its
    process down is a counted failure and masks its samples: it never becomes reward 0. What hangs is killed
        with all it started, and its worker
    is started anew. Workers hold no torch, are no forks of this process and end with it.

    Args:
        rewards: functions, by name or with weight and options.
        num_workers: processes.
        timeout: seconds that one call may take.
        startup_timeout: seconds that importing the functions may take.
        max_failed: share of the samples of one `gather` whose scoring may fail.
        max_concurrent: calls of an async function that one worker waits for at once.
        log: file for what the functions print; by default it is dropped.

    Raises RewardError when a function cannot be found or imported.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec | str | Callable[..., Any]],
        *,
        num_workers: int = 1,
        timeout: float = 30.0,
        startup_timeout: float = 60.0,
        max_failed: float = MAX_FAILED,
        max_concurrent: int = 64,
        log: Path | None = None,
    ) -> None:
        self.specs = [as_spec(reward) for reward in rewards]
        if not self.specs:
            raise RewardError("There must be at least one reward function.")
        self.names = labels(self.specs)
        self.weights = {name: spec.weight for name, spec in zip(self.names, self.specs, strict=True)}
        self.max_failed = max_failed
        config = {
            "targets": [target(spec) for spec in self.specs],
            "num_workers": num_workers,
            "timeout": timeout,
            "startup_timeout": startup_timeout,
            "max_concurrent": max_concurrent,
            "log": str(log.resolve()) if log else None,
            "sys_path": [str(Path.cwd()), *(path for path in sys.path if path)],
        }
        self._scores: dict[int, Score] = {}
        self._missing: dict[int, int] = {}
        self._jobs: dict[int, tuple[int, list[int]]] = {}
        self._groups: dict[tuple[int, Hashable], list[tuple[int, Sample]]] = {}
        self._num_tickets = self._num_jobs = 0
        self._link = Link(config)
        try:
            self._link.await_functions()
        except BaseException:
            self.close()
            raise

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise RewardError when a function needs a column that the data set does not have."""
        given = {
            *columns,
            "prompts",
            "completions",
            "completion_ids",
            "trainer_state",
            "log_metric",
            "log_extra",
        }
        for name, function in zip(self.names, self._link.functions, strict=True):
            for needed in function["required"]:
                if needed not in given:
                    near = difflib.get_close_matches(needed, columns, n=1)
                    hint = f" If {near[0]!r} is meant, rename that column." if near else ""
                    raise RewardError(
                        f"The reward {name} needs a column {needed!r}, but the data set has "
                        f"{', '.join(sorted(columns)) or 'none'}."
                        f"{hint} Rename a column or set the option {needed!r} of the reward."
                    )

    def submit(self, sample: Sample) -> int:
        """Hand a completion to the workers and return at once; the number is its ticket for `gather`."""
        ticket = self._num_tickets
        self._num_tickets += 1
        self._scores[ticket] = Score()
        self._missing[ticket] = len(self.specs)
        for index, spec in enumerate(self.specs):
            if spec.per == "sample" or sample.group is None:
                self._send(index, [(ticket, sample)])
                continue
            siblings = self._groups.setdefault((index, sample.group), [])
            siblings.append((ticket, sample))
            if len(siblings) >= sample.group_size:
                self._send(index, self._groups.pop((index, sample.group)))
        self._take(0.0)
        return ticket

    def gather(
        self, tickets: Sequence[int], while_waiting: Callable[[], bool] = lambda: False
    ) -> list[Score]:
        """The scores of `tickets`, in their order; waits for those that are not there yet.

        Args:
            while_waiting: called again and again until they are; what it returns says whether it did
                something, and so need not be followed by a sleep.

        Raises RewardError when the functions failed on more than `max_failed` of them.
        """
        wanted = set(tickets)
        for key, samples in list(self._groups.items()):  # groups of which some never came
            if any(ticket in wanted for ticket, _ in samples):
                self._send(key[0], self._groups.pop(key))
        spoke = time.monotonic()
        while any(self._missing[ticket] for ticket in tickets):
            if self._take(0.0 if while_waiting() else 1.0):
                spoke = time.monotonic()
            elif time.monotonic() - spoke > _WATCH:
                spoke = time.monotonic()
                names = sorted({self.names[index] for index, _ in self._jobs.values()})
                _log.warning("still waiting for %d reward calls: %s", len(self._jobs), ", ".join(names))
        scores = [self._scores.pop(ticket) for ticket in tickets]
        for ticket, score in zip(tickets, scores, strict=True):
            del self._missing[ticket]
            score.close(self.weights)
        check_failures(scores, self.max_failed)
        return scores

    def close(self) -> None:
        """End the workers and everything that they started."""
        self._link.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, index: int, samples: list[tuple[int, Sample]]) -> None:
        number = self._num_jobs
        self._num_jobs += 1
        self._jobs[number] = (index, [ticket for ticket, _ in samples])
        self._link.send(number, index, _packed([sample for _, sample in samples]))

    def _take(self, timeout: float) -> bool:
        """Enter the results that arrive within `timeout`; whether there were any."""
        results = self._link.receive(timeout)
        for result in results:
            index, tickets = self._jobs.pop(result["id"])
            name = self.names[index]
            for position, ticket in enumerate(tickets):
                score = self._scores.get(ticket)
                if score is None:
                    continue
                self._missing[ticket] -= 1
                if "failure" in result:
                    score.values[name] = None
                    score.failures.append(Failure(name, str(result["failure"]), str(result["message"])))
                    continue
                score.values[name] = result["values"][position]
                score.parts.update({f"{name}/{part}": x for part, x in result["parts"][position].items()})
                for metric, values in result["metrics"].items():
                    score.parts[metric] = sum(values) / len(values)
        return bool(results)


def _packed(samples: list[Sample]) -> bytes:
    """The arguments of one call."""
    first = samples[0]
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    arguments = {
        "prompts": [sample.prompt for sample in samples],
        "completions": [sample.completion for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        "columns": {name: [sample.columns.get(name) for sample in samples] for name in names},
        "step": first.step,
    }
    try:
        return pickle.dumps(arguments)
    except Exception as error:
        raise RewardError(
            f"The columns {', '.join(names)} cannot be sent to the reward processes ({error}). Keep plain "
            "values in the data set."
        ) from None
