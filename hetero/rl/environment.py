"""What the model talks to. An environment is used for one trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hetero.data.chat import ChatRenderer
from hetero.rl.rewards.pool import RewardPool, Sample
from hetero.rl.task import Task


class Completion(Protocol):
    """What an engine returns for a prompt, as far as rollouts look at it."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def adapter_version(self) -> int: ...
    @property
    def routes(self) -> Any | None: ...
    @property
    def stop(self) -> int | str | None: ...
    @property
    def message(self) -> str: ...


@dataclass(frozen=True)
class Slot:
    """The place of a trajectory in a step.

    Attributes:
        step: optimiser step.
        serial: number of the group's draw in the run.
        sample: number of the trajectory in its group.
        group_size: trajectories in the group.
    """

    step: int
    serial: int
    sample: int
    group_size: int


@dataclass(frozen=True)
class Step:
    """An environment's answer to what the model said.

    Attributes:
        text: what the model said, as people and reward functions read it.
        done: whether the trajectory is over.
        token_ids: if not, what to append before the model speaks again.
        reward: a number, if the environment knows it; None leaves it to the ticket.
        ticket: of the reward pool, where the score will be.
    """

    text: str
    done: bool = True
    token_ids: Sequence[int] = ()
    reward: float | None = None
    ticket: int | None = None


class Environment(Protocol):
    """A conversation partner for one trajectory.

    An exception from either method stops the run: what can go wrong in the world belongs in the answer to
    the model.
    """

    def start(self, task: Task) -> list[int]:
        """The prompt's token ids."""
        ...

    def step(self, completion: Completion) -> Step:
        """What follows on the tokens that the model sampled."""
        ...


EnvironmentFactory: TypeAlias = Callable[[Slot], Environment]


class SingleTurn:
    """Asks once and has the reply scored by reward functions while other replies are still being written.

    `functools.partial(SingleTurn, renderer, pool)` is the factory that `rollout` wants.
    """

    def __init__(self, renderer: ChatRenderer, pool: RewardPool, slot: Slot) -> None:
        self._renderer = renderer
        self._pool = pool
        self._slot = slot
        self._task: Task | None = None

    def start(self, task: Task) -> list[int]:
        """The prompt as the chat template renders it."""
        self._task = task
        return task.token_ids(self._renderer)

    def step(self, completion: Completion) -> Step:
        """The end, with the ticket of the score. A stop string and what follows are no part of the text."""
        assert self._task is not None, "start() comes first"
        text = self._renderer.text(completion.token_ids)
        if isinstance(completion.stop, str):
            text = text.partition(completion.stop)[0]
        sample = Sample(
            prompt=self._task.prompt,
            completion=self._task.reply(text),
            columns=self._task.columns,
            completion_ids=completion.token_ids,
            step=self._slot.step,
            group=self._slot.serial,
            group_size=self._slot.group_size,
        )
        return Step(text, ticket=self._pool.submit(sample))
