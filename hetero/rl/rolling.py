"""A step's trajectories while they are being sampled and scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hetero.errors import ModelError
from hetero.rl.environment import Completion, Environment, EnvironmentFactory, Slot, Step
from hetero.rl.rewards.pool import MAX_FAILED, RewardPool
from hetero.rl.task import Task
from hetero.rl.trajectory import Group, Trajectory


class BeginFn(Protocol):
    """An engine's `begin`, or its `generate`: queues prompts and calls `on_finish` as completions end."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        *,
        streams: Sequence[tuple[int, int]],
        on_finish: Callable[[int, Any], None],
    ) -> object: ...


class Rolling:
    """Trajectories of tasks that are being sampled, while others are sampled beside them.

    What is sampled depends on the policy, the task, `sampling` and (serial, sample) only, not on the order
    in which things finish.

    Args:
        begin: the engine's; what it queues is carried on by whoever steps the engine.
        make_environment: makes a fresh environment for a slot.
        group_size: trajectories of each task.
        sampling: what `begin` takes as its parameters, the same for all.
        pool: where environments have their rewards computed, if they do.
        serials: number of each task's draw in the run; (0, 1, ...) by default. No two draws of a run may
            share one.
        step: optimiser step, for reward functions that ask.
        on_progress: called with (trajectories done, all) as they end.
    """

    def __init__(
        self,
        begin: BeginFn,
        tasks: Sequence[Task],
        make_environment: EnvironmentFactory,
        *,
        group_size: int,
        sampling: Any,
        pool: RewardPool | None = None,
        serials: Sequence[int] | None = None,
        step: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.on_progress = on_progress
        self._begin = begin
        self._sampling = sampling
        self._pool = pool
        self._tasks = list(zip(tasks, range(len(tasks)) if serials is None else serials, strict=True))
        slots = [Slot(step, serial, i, group_size) for _, serial in self._tasks for i in range(group_size)]
        self._attempts = [
            _Attempt(self._tasks[i // group_size][0], make_environment(slot), slot)
            for i, slot in enumerate(slots)
        ]
        self._group_size = group_size
        self._ready = list(self._attempts)  # to speak
        self._num_done = 0

    def pump(self) -> bool:
        """Let those who may speak begin to; False when every trajectory is over."""
        speaking, self._ready = self._ready, []
        if speaking:
            self._speak(speaking)
        return self._num_done < len(self._attempts)

    def report(self, on_progress: Callable[[int, int], None]) -> None:
        """Call `on_progress` now and whenever a trajectory ends."""
        self.on_progress = on_progress
        if self._num_done:
            on_progress(self._num_done, len(self._attempts))

    def collect(self, while_waiting: Callable[[], bool] = lambda: False) -> list[Group]:
        """The groups in the order of the tasks, with their rewards; waits for those that are being computed.

        Raises RewardError when too many rewards failed, ModelError when the engine gave as many answers up.
        """
        _check_given_up(self._attempts, MAX_FAILED if self._pool is None else self._pool.max_failed)
        _collect(self._attempts, self._pool, while_waiting)
        size = self._group_size
        return [
            Group(task, serial, [attempt.trajectory for attempt in self._attempts[i * size : (i + 1) * size]])
            for i, (task, serial) in enumerate(self._tasks)
        ]

    def _speak(self, speaking: Sequence[_Attempt]) -> None:
        waiting = dict(enumerate(speaking))

        def finish(index: int, completion: Completion) -> None:
            attempt = waiting.pop(index, None)
            if attempt is None:
                return
            attempt.take(completion)
            if not attempt.done:
                self._ready.append(attempt)
                return
            self._num_done += 1
            if self.on_progress is not None:
                self.on_progress(self._num_done, len(self._attempts))

        prompts = [[*a.trajectory.prompt_ids, *a.trajectory.completion_ids] for a in speaking]
        self._begin(prompts, self._sampling, streams=[a.stream for a in speaking], on_finish=finish)


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
        trajectory.adapter_versions.append(completion.adapter_version)
        if completion.routes is not None:
            trajectory.routes.append(completion.routes)
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


def _check_given_up(attempts: Sequence[_Attempt], max_fraction: float) -> None:
    """Raise ModelError when the engine aborted more than `max_fraction` of the trajectories: a model that
    computes NaN would else run to the end and learn nothing."""
    gone = [a.trajectory for a in attempts if a.trajectory.finish_reason == "abort"]
    if len(gone) > max_fraction * len(attempts):
        raise ModelError(
            f"The engine gave up {len(gone)} of {len(attempts)} answers, more than the {max_fraction:.0%} "
            f"that may fail. The first: {gone[0].error}. If it was so from the first step on, the checkpoint "
            "holds NaN or infinite weights, or its data type has too small a range: fetch it anew, try it in "
            "Transformers. If it came later, the adapter has diverged: lower train.lr and begin a new run."
        )


def _collect(
    attempts: Sequence[_Attempt], pool: RewardPool | None, while_waiting: Callable[[], bool]
) -> None:
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
    scores = pool.gather([ticket for _, ticket in scored], while_waiting)
    for (attempt, _), score in zip(scored, scores, strict=True):
        trajectory = attempt.trajectory
        trajectory.score, trajectory.reward = score, score.total
        if score.failures:
            first = score.failures[0]
            trajectory.error = f"the reward {first.reward} failed ({first.kind}): {first.message}"
        elif score.total is None:
            trajectory.error = "no reward function applies"
