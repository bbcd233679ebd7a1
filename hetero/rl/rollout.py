"""Rollouts: groups of attempts at tasks, scored while the others are still being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetero.rl.environment import Completion, Environment, EnvironmentFactory, Slot, Step
from hetero.rl.rewards.pool import RewardPool
from hetero.rl.task import Task
from hetero.rl.trajectory import Group, Trajectory


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
    """`group_size` trajectories of each task.

    What is sampled depends on the policy, the task, `sampling` and (serial, sample) only, not on the order
    in which things finish.

    Args:
        generate: the engine's.
        make_environment: makes a fresh environment for a slot.
        sampling: what `generate` takes as its parameters, the same for all.
        pool: where environments have their rewards computed, if they do.
        serials: number of each task's draw in the run; (0, 1, ...) by default. No two draws of a run may
            share one.
        step: optimiser step, for reward functions that ask.
        on_progress: called with (trajectories done, all) as they end.

    Raises RewardError when too many rewards failed. A trajectory that the engine aborted is masked, with
    `error` set.
    """
    numbers = range(len(tasks)) if serials is None else serials
    attempts = [
        _Attempt(task, make_environment(slot), slot)
        for task, serial in zip(tasks, numbers, strict=True)
        for slot in (Slot(step, serial, sample, group_size) for sample in range(group_size))
    ]
    begin = time.perf_counter()
    speaking = attempts
    num_done = 0

    def finished() -> None:
        nonlocal num_done
        num_done += 1
        if on_progress is not None:
            on_progress(num_done, len(attempts))

    while speaking:
        _turn(generate, speaking, sampling, finished)
        speaking = [attempt for attempt in speaking if not attempt.done]
    generated = time.perf_counter()
    _collect(attempts, pool)
    groups = [
        Group(
            task, serial, [attempt.trajectory for attempt in attempts[i * group_size : (i + 1) * group_size]]
        )
        for i, (task, serial) in enumerate(zip(tasks, numbers, strict=True))
    ]
    return Rollout(groups, generated - begin, time.perf_counter() - generated)


class _Attempt:
    """A trajectory in the making."""

    def __init__(self, task: Task, environment: Environment, slot: Slot) -> None:
        self.environment = environment
        self.slot = slot
        self.trajectory = Trajectory(environment.start(task))
        self.done = False
        self.last: Step | None = None

    @property
    def stream(self) -> tuple[int, int]:
        """Of the coming turn: no two turns of a run share a random stream."""
        return self.slot.serial, self.slot.sample + self.trajectory.num_turns * self.slot.group_size

    def take(self, completion: Completion) -> None:
        """Enter what the model said and what the environment makes of it."""
        trajectory = self.trajectory
        trajectory.num_turns += 1
        trajectory.finish_reason = completion.finish_reason
        trajectory.adapter_version = completion.adapter_version
        self._append(completion.token_ids, completion.logprobs, sampled=True)
        if completion.finish_reason == "abort":
            self.done, trajectory.error = True, f"the engine aborted it: {completion.message}"
            return
        self.last = self.environment.step(completion)
        trajectory.text += self.last.text
        self.done = self.last.done
        if not self.done:
            self._append(self.last.token_ids, [0.0] * len(self.last.token_ids), sampled=False)

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.trajectory.completion_ids.extend(token_ids)
        self.trajectory.logprobs.extend(logprobs)
        self.trajectory.mask.extend([sampled] * len(token_ids))


def _turn(
    generate: GenerateFn,
    speaking: Sequence[_Attempt],
    sampling: Any,
    finished: Callable[[], None],
) -> None:
    """Let each of `speaking` say one thing."""
    waiting = dict(enumerate(speaking))

    def finish(index: int, completion: Completion) -> None:
        attempt = waiting.pop(index, None)
        if attempt is not None:
            attempt.take(completion)
            if attempt.done:
                finished()

    prompts = [[*a.trajectory.prompt_ids, *a.trajectory.completion_ids] for a in speaking]
    completions = generate(prompts, sampling, streams=[a.stream for a in speaking], on_finish=finish)
    for index, completion in enumerate(completions):
        finish(index, completion)


def _collect(attempts: Sequence[_Attempt], pool: RewardPool | None) -> None:
    """Give every trajectory its reward; waits for those that are still being computed."""
    scored = [
        (attempt, attempt.last.ticket)
        for attempt in attempts
        if attempt.last and attempt.last.ticket is not None
    ]
    for attempt in attempts:
        if attempt.last is not None:
            attempt.trajectory.reward = attempt.last.reward
    if not scored:
        return
    if pool is None:
        raise ValueError("the environment has rewards computed by a pool, so rollout() needs that pool")
    for (attempt, _), score in zip(scored, pool.gather([ticket for _, ticket in scored]), strict=True):
        trajectory = attempt.trajectory
        trajectory.score, trajectory.reward = score, score.total
        if score.failures:
            first = score.failures[0]
            trajectory.error = f"the reward {first.reward} failed ({first.kind}): {first.message}"
        elif score.total is None:
            trajectory.error = "no reward function applies"
