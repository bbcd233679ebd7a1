from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from hetero.data.chat import ChatRenderer
from hetero.data.dataset import Dataset
from hetero.errors import RewardError
from hetero.rl.advantages import assign_advantages
from hetero.rl.batch import train_samples
from hetero.rl.environment import SingleTurn, Step
from hetero.rl.metrics import completion_rows, rollout_metrics
from hetero.rl.rewards import RewardPool, RewardSpec
from hetero.rl.rollout import rollout
from hetero.rl.task import tasks_of

STRANGE = f"{Path(__file__).parent / 'rewards' / 'strange_rewards.py'}:"
DATA = Dataset([({"prompt": f"{i}+1?", "answer": str(i + 1)}, f"row {i}") for i in range(5)], "d")


@dataclass
class Reply:
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str = "stop"
    adapter_version: int = 3
    stop: int | str | None = None
    message: str = ""
    routes: None = None


@dataclass
class FakeEngine:
    """Says what `say` makes of (prompt text, stream), one after the other in a random order."""

    tokenizer: object
    say: object
    seconds: float = 0.0
    order: random.Random = field(default_factory=lambda: random.Random(0))
    streams: list = field(default_factory=list)
    prompts: list = field(default_factory=list)

    def generate(self, prompts, params, *, streams=None, on_finish=None):
        assert params == "the parameters"
        self.streams += streams
        self.prompts += prompts
        replies = [None] * len(prompts)
        for index in self.order.sample(range(len(prompts)), len(prompts)):
            said = self.say(self.tokenizer.decode(prompts[index]), streams[index])
            if isinstance(said, str):
                ids = [*self.tokenizer.encode(said), self.tokenizer.eos_token_id]
                said = Reply(ids, [-0.5] * len(ids))
            replies[index] = said
            time.sleep(self.seconds)
            on_finish(index, said)
        return replies


def _answer(prompt: str, stream: tuple[int, int]) -> str:
    """Right for even samples."""
    number = int(prompt.rpartition("user\n")[2].partition("+")[0])
    return f"It is {number + 1 + stream[1] % 2}"


def _run(engine, pool, renderer, **options):
    settings = {
        "group_size": 4,
        "sampling": "the parameters",
        "pool": pool,
        "serials": range(10, 15),
        **options,
    }
    return rollout(engine.generate, tasks_of(DATA), partial(SingleTurn, renderer, pool), **settings)


def test_groups_come_in_the_order_of_tasks_whatever_finishes_first(tiny_tokenizer):
    renderer = ChatRenderer(tiny_tokenizer)
    seen = []
    with RewardPool(["last_number"], num_workers=2) as pool:
        runs = []
        for seed in range(3):
            engine = FakeEngine(tiny_tokenizer, _answer, order=random.Random(seed))
            runs.append(_run(engine, pool, renderer, on_progress=lambda done, of: seen.append((done, of))))
    assert runs[0].groups == runs[1].groups == runs[2].groups
    assert seen[:20] == [(done, 20) for done in range(1, 21)]
    assert engine.streams == [(serial, sample) for serial in range(10, 15) for sample in range(4)]
    for index, group in enumerate(runs[0].groups):
        assert (group.task.index, group.serial) == (index, 10 + index)
        assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 0.0]
        assert [t.text for t in group.trajectories][:2] == [f"It is {index + 1}", f"It is {index + 2}"]
        for trajectory in group.trajectories:
            assert trajectory.completion_ids[-1] == tiny_tokenizer.eos_token_id
            assert trajectory.prompt_ids == group.task.token_ids(renderer)
            assert len(trajectory.logprobs) == len(trajectory.mask) == len(trajectory.completion_ids)
            assert trajectory.adapter_version == 3
    assert runs[0].num_tokens == sum(len(t.completion_ids) for g in runs[0].groups for t in g.trajectories)


def test_rewards_are_computed_while_generation_goes_on(tiny_tokenizer):
    engine = FakeEngine(tiny_tokenizer, lambda *_: "sleep 0.1", seconds=0.12)
    with RewardPool([STRANGE + "by_name"]) as pool:
        run = _run(engine, pool, ChatRenderer(tiny_tokenizer))
    assert all(t.reward == 1.0 for group in run.groups for t in group.trajectories)
    assert run.seconds_generate > 2.0, "20 completions of 0.12 s"
    assert run.seconds_reward < 1.0, "20 rewards of 0.1 s were hidden behind them"


def test_failures_and_aborts_are_masked_and_counted(tiny_tokenizer):
    def say(prompt, stream):
        return {
            (10, 0): "raise",
            (10, 1): "hang",
            (11, 0): Reply([65, 66], [-1.0, math.nan], "abort", message="its logits turned NaN"),
            (11, 1): "none",
            (11, 2): Reply([*tiny_tokenizer.encode("value 4")], [-1.0] * 7, "length"),
        }.get(stream, f"value {stream[1]}")

    with RewardPool([RewardSpec(STRANGE + "by_name", weight=2.0)], timeout=2.0, num_workers=2) as pool:
        run = _run(FakeEngine(tiny_tokenizer, say), pool, ChatRenderer(tiny_tokenizer))
    first, second = run.groups[0].trajectories, run.groups[1].trajectories
    assert [t.reward for t in first] == [None, None, 4.0, 6.0]
    assert [t.reward for t in second] == [None, None, 8.0, 6.0]
    assert "ZeroDivisionError" in first[0].error
    assert "timeout" in first[1].error
    assert second[0].error == "the engine aborted it: its logits turned NaN"
    assert second[1].error == "no reward function applies"
    assert assign_advantages(run.groups, "group_mean") == 2 + 2 + 3 * 4
    assert [t.advantage for t in first] == [0.0, 0.0, -1.0, 1.0]

    samples = train_samples(run.groups)
    assert len(samples) == 20 - 4
    assert all(math.isfinite(x) for sample in samples for x in sample.logprobs)
    assert len(train_samples(run.groups, train_truncated=False)) == 20 - 5
    assert {sample.group for sample in samples} == set(range(10, 15))
    assert samples[0].adapter_version == 3

    metrics = rollout_metrics(run.groups)
    assert metrics["data/masked"] == 4
    assert metrics["data/reward_errors"] == 1
    assert metrics["data/reward_timeouts"] == 1
    assert metrics["data/rollout_errors"] == 1
    assert metrics["stop/length"] == 1 / 20
    assert metrics["stop/abort"] == 1 / 20
    assert metrics["completions/clipped_ratio"] == 1 / 19
    known = [t.reward for g in run.groups for t in g.trajectories if t.reward is not None]
    assert metrics["reward"] == pytest.approx(sum(known) / 16)
    assert metrics["rewards/by_name/mean"] == pytest.approx(sum(known) / 32)
    stds = [math.sqrt(2), math.sqrt(2)] + [math.sqrt(20 / 3)] * 3
    assert metrics["reward_std"] == pytest.approx(sum(stds) / 5)
    assert metrics["frac_reward_zero_std"] == 0.0

    rows = list(completion_rows(7, run.groups))
    assert len(rows) == 20
    assert rows[2]["step"] == 7
    assert rows[2]["prompt"] == "0+1?"
    assert rows[2]["answer"] == "1"
    assert rows[2]["completion"] == "value 2"
    assert rows[2]["rewards"] == {"by_name": 2.0}


def test_too_many_failed_rewards_stop_the_step(tiny_tokenizer):
    engine = FakeEngine(tiny_tokenizer, lambda _, stream: "raise" if stream[1] else "value 1")
    with (
        RewardPool([STRANGE + "by_name"], max_failed=0.5) as pool,
        pytest.raises(RewardError, match=r"15 of 20 samples \(75%\)"),
    ):
        _run(engine, pool, ChatRenderer(tiny_tokenizer))


def test_stop_strings_are_no_part_of_the_reply(tiny_tokenizer):
    ids = tiny_tokenizer.encode("It is 1. END of 7")
    engine = FakeEngine(tiny_tokenizer, lambda *_: Reply(ids, [-1.0] * len(ids), stop=" END"))
    with RewardPool(["last_number"]) as pool:
        run = _run(engine, pool, ChatRenderer(tiny_tokenizer))
    trajectory = run.groups[0].trajectories[0]
    assert trajectory.text == "It is 1."
    assert trajectory.reward == 1.0
    assert trajectory.completion_ids == ids, "what was sampled is trained on as it is"


class Guess:
    """Several turns: higher or lower."""

    def __init__(self, renderer, slot):
        self.renderer, self.slot, self.turns = renderer, slot, 0

    def start(self, task):
        return task.token_ids(self.renderer)

    def step(self, completion):
        self.turns += 1
        text = self.renderer.text(completion.token_ids)
        if self.turns > self.slot.sample:
            return Step(text + ".", reward=float(self.turns))
        more = [{"role": "user", "content": "higher"}]
        return Step(text + ", ", done=False, token_ids=self.renderer.turn(completion.token_ids, more))


def test_several_turns_append_and_mask(tiny_tokenizer):
    renderer = ChatRenderer(tiny_tokenizer)
    engine = FakeEngine(tiny_tokenizer, lambda prompt, stream: f"{stream[1]}")
    tasks = tasks_of(DATA)[:2]
    run = rollout(engine.generate, tasks, partial(Guess, renderer), group_size=3, sampling="the parameters")
    assert len(set(engine.streams)) == len(engine.streams) == 2 * (1 + 2 + 3), (
        "no turn repeats a random stream"
    )
    for group in run.groups:
        assert [t.reward for t in group.trajectories] == [1.0, 2.0, 3.0]
        assert [t.num_turns for t in group.trajectories] == [1, 2, 3]
        assert [t.text for t in group.trajectories] == ["0.", "1, 4.", "2, 5, 8."]
        for trajectory in group.trajectories:
            assert len(trajectory.mask) == len(trajectory.completion_ids) == len(trajectory.logprobs)
            said = [i for i, m in zip(trajectory.completion_ids, trajectory.mask, strict=True) if m]
            assert len(said) == 2 * trajectory.num_turns
            assert trajectory.num_sampled == len(said)
            whole = tiny_tokenizer.decode([*trajectory.prompt_ids, *trajectory.completion_ids])
            assert (
                whole.count("<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n")
                == trajectory.num_turns - 1
            )
    long = run.groups[0].trajectories[2]
    assign_advantages(run.groups, "group_mean")
    samples = train_samples(run.groups)
    assert samples[0].mask is None
    assert samples[2].mask == long.mask
    assert engine.prompts[-1][: len(long.prompt_ids)] in [
        t.prompt_ids for g in run.groups for t in g.trajectories
    ]


def test_a_pool_is_asked_for():
    class Scored(Guess):
        def step(self, completion):
            return Step("x", ticket=0)

    def generate(prompts, params, *, streams=None, on_finish=None):
        return [Reply([1], [0.0]) for _ in prompts]

    with pytest.raises(ValueError, match="needs that pool"):
        rollout(
            generate,
            tasks_of(DATA)[:1],
            partial(Scored, type("R", (), {"prompt": lambda self, m: [1]})()),
            group_size=1,
            sampling=None,
        )


def test_metrics_of_nothing():
    metrics = rollout_metrics([])
    assert "reward" not in metrics
    assert metrics["data/masked"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
