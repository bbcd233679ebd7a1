"""Rollouts of several steps in one engine: each has its own tasks, version and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from hetero.data.dataset import Dataset
from hetero.errors import RewardError
from hetero.rl.batch import train_samples
from hetero.rl.environment import Slot, Step
from hetero.rl.metrics import rollout_metrics
from hetero.rl.rolling import Rolling
from hetero.rl.task import Task, tasks_of

DATA = Dataset([({"prompt": f"{i}?"}, f"row {i}") for i in range(4)], "d")


@dataclass
class Said:
    token_ids: list[int]
    adapter_version: int
    finish_reason: str = "stop"
    routes: None = None
    stop: None = None
    message: str = ""

    @property
    def logprobs(self) -> list[float]:
        return [-1.0] * len(self.token_ids)


@dataclass
class Queue:
    """An engine that ends one completion per step, the youngest first."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    asked: list[tuple[int | None, list[int], tuple[int, int]]] = field(default_factory=list)
    shift: int = 0

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        *,
        streams: Sequence[tuple[int, int]],
        on_finish: Callable[[int, Any], None],
        version: int = 0,
    ) -> None:
        for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            self.asked.append((version, list(prompt), stream))
            said = Said([100 + stream[0], 100 + stream[1]], version + self.shift)
            self.waiting.append(partial(on_finish, index, said))

    def step(self) -> bool:
        if not self.waiting:
            return False
        self.waiting.pop()()
        return True


class Turns:
    """As many turns as the number of the sample; its reward is the last token."""

    def __init__(self, slot: Slot) -> None:
        self.left = slot.sample + 1

    def start(self, task: Task) -> list[int]:
        return [task.index]

    def step(self, completion: Said) -> Step:
        self.left -= 1
        reward = float(completion.token_ids[-1]) if not self.left else None
        return Step(str(completion.token_ids), done=not self.left, token_ids=[7], reward=reward)


def rolling(engine: Queue, version: int, serial: int, **options: Any) -> Rolling:
    begin = partial(engine.begin, version=version)
    tasks = tasks_of(DATA)[:2]
    return Rolling(begin, tasks, Turns, group_size=3, sampling=None, serials=[serial, serial + 1], **options)


def test_two_steps_go_on_side_by_side() -> None:
    engine, seen = Queue(), []
    one, two = rolling(engine, 4, 10), rolling(engine, 5, 20)
    one.pump()
    two.pump()
    while one.pump():
        two.pump()
        assert engine.step()
    one.report(lambda done, total: seen.append((done, total)))
    assert seen == [(6, 6)]
    two.report(lambda done, total: seen.append((done, total)))
    while two.pump():
        assert engine.step()
    assert seen[-1] == (6, 6)
    assert [done for done, _ in seen[1:]] == sorted(done for done, _ in seen[1:])
    assert not engine.step()
    for each, version, serial in ((one, 4, 10), (two, 5, 20)):
        groups = each.collect()
        assert [group.serial for group in groups] == [serial, serial + 1]
        trajectories = [t for group in groups for t in group.trajectories]
        assert [t.num_turns for t in trajectories] == [1, 2, 3] * 2
        assert {v for t in trajectories for v in t.adapter_versions} == {version}
        assert {sample.adapter_version for sample in train_samples(groups)} == {version}
        assert all(
            t.completion_ids[:2] == [100 + g.serial, 100 + i]
            for g in groups
            for i, t in enumerate(g.trajectories)
        )
    streams = [stream for _, _, stream in engine.asked]
    assert len(streams) == len(set(streams)) == 4 * (1 + 2 + 3), "no turn repeats a random stream"


def test_a_trajectory_of_several_versions_is_counted() -> None:
    engine = Queue()
    each = rolling(engine, 1, 0)
    while each.pump():
        engine.step()
        engine.shift += 1  # as an engine that followed the newest adapter would
    assert rollout_metrics(each.collect())["off_policy/mixed_version_traj"] == 4


def test_a_reward_that_fails_says_so_to_its_own_step_only() -> None:
    class Pool:
        max_failed = 0.2

        def gather(self, tickets: Sequence[int], while_waiting: Callable[[], bool]) -> list[Any]:
            while while_waiting():
                pass
            raise RewardError("too many")

    class Scored(Turns):
        def step(self, completion: Said) -> Step:
            return Step("x", ticket=1)

    engine = Queue()
    begin = partial(engine.begin, version=1)
    bad = Rolling(begin, tasks_of(DATA)[:1], Scored, group_size=2, sampling=None, pool=Pool())
    good = rolling(engine, 2, 5)
    while bad.pump():
        engine.step()
    good.pump()
    with pytest.raises(RewardError, match="too many"):
        bad.collect(while_waiting=lambda: good.pump() and engine.step())
    assert not good.pump(), "the other step went on while the reward was awaited"
