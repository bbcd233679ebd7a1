"""Rollouts: groups of attempts at tasks, scored while the others are still being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetero.rl.environment import Completion, EnvironmentFactory
from hetero.rl.rewards.pool import RewardPool
from hetero.rl.rolling import Rolling
from hetero.rl.task import Task
from hetero.rl.trajectory import Group


class GenerateFn(Protocol):
    """An engine's `generate`; it calls `on_finish(index, completion)` as each completion ends."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        *,
        streams: Sequence[tuple[int, int]] | None = None,
        on_finish: Callable[[int, Any], None] | None = None,
    ) -> Sequence[Completion]: ...


@dataclass(frozen=True)
class Rollout:
    """The groups of a step and what they took.

    Attributes:
        groups: in the order of the tasks.
        seconds_generate: wall time of generation, in which most rewards are computed too.
        seconds_reward: wall time spent on nothing but waiting for rewards afterwards.
    """

    groups: list[Group]
    seconds_generate: float
    seconds_reward: float

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(t.num_sampled for group in self.groups for t in group.trajectories)


def rollout(
    generate: GenerateFn,
    tasks: Sequence[Task],
    make_environment: EnvironmentFactory,
    *,
    group_size: int,
    sampling: Any,
    pool: RewardPool | None = None,
    serials: Sequence[int] | None = None,
    step: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """`group_size` trajectories of each task, all at once; see `Rolling` for the arguments.

    Raises RewardError when too many rewards failed, ModelError when the engine gave as many answers up. A
    trajectory that it aborted is masked, with `error` set.
    """

    def begin(
        prompts: Sequence[Sequence[int]],
        params: Any,
        *,
        streams: Sequence[tuple[int, int]],
        on_finish: Callable[[int, Any], None],
    ) -> None:
        for index, completion in enumerate(generate(prompts, params, streams=streams, on_finish=on_finish)):
            on_finish(index, completion)  # of a `generate` that has not called it

    started = time.perf_counter()
    rolling = Rolling(
        begin,
        tasks,
        make_environment,
        group_size=group_size,
        sampling=sampling,
        pool=pool,
        serials=serials,
        step=step,
        on_progress=on_progress,
    )
    while rolling.pump():
        pass
    generated = time.perf_counter()
    return Rollout(rolling.collect(), generated - started, time.perf_counter() - generated)
