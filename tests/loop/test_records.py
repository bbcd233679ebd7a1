"""Records of evaluations and steps, from rollouts that a dictated engine made."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from hetero.data.chat import ChatRenderer
from hetero.engine.stats import EngineStats
from hetero.rl.environment import SingleTurn
from hetero.rl.rewards.pool import RewardPool
from hetero.rl.rollout import rollout
from hetero.rl.task import Task
from hetero.run.clock import Clock
from hetero.run.evaluation import FIRST_SERIAL, evaluate
from hetero.run.metrics import step_record


@dataclass(frozen=True)
class Said:
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str = "stop"
    adapter_version: int = 0
    stop: int | str | None = None
    message: str = ""
    routes: None = None


class Dictated:
    """An engine that says the given texts in turn, and remembers its random streams."""

    def __init__(self, renderer: ChatRenderer, *texts: str) -> None:
        self.ids = [renderer.plain(text) for text in texts]
        self.streams: list[tuple[int, int]] = []

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        *,
        streams: Sequence[tuple[int, int]] | None = None,
        on_finish: Callable[[int, Any], None] | None = None,
    ) -> list[Said]:
        self.streams += streams or []
        return [
            Said(self.ids[i % len(self.ids)], [-1.0] * len(self.ids[i % len(self.ids)]))
            for i in range(len(prompts))
        ]


@pytest.fixture(scope="module")
def pool() -> Any:
    with RewardPool(["last_number"]) as opened:
        yield opened


def tasks(*answers: str) -> list[Task]:
    return [
        Task(f"question {i}", [{"role": "user", "content": f"question {i}"}], {"answer": answer}, i)
        for i, answer in enumerate(answers)
    ]


def test_accuracy_is_the_share_of_right_completions(tiny_tokenizer: Any, pool: RewardPool) -> None:
    renderer = ChatRenderer(tiny_tokenizer)
    engine = Dictated(renderer, "1", "2", "it is 2", "no idea")
    record = evaluate(
        engine,
        tasks("1", "2"),
        partial(SingleTurn, renderer, pool),
        pool,
        samples=2,
        sampling=None,
        correct_from=1.0,
        step=7,
    )
    assert (record["step"], record["accuracy"], record["samples"], record["masked"]) == (7, 0.5, 4, 0)
    assert record["reward"] == 0.5
    assert engine.streams == [(FIRST_SERIAL + task, sample) for task in range(2) for sample in range(2)]
    json.dumps(record, allow_nan=False)


def test_what_cannot_be_scored_is_no_wrong_answer(tiny_tokenizer: Any, pool: RewardPool) -> None:
    renderer = ChatRenderer(tiny_tokenizer)
    unscored = [Task("q", [{"role": "user", "content": "q"}], {"answer": None}, 0)]
    make = partial(SingleTurn, renderer, pool)
    record = evaluate(
        Dictated(renderer, "1"), unscored, make, pool, samples=3, sampling=None, correct_from=1.0, step=0
    )
    assert (record["accuracy"], record["samples"], record["masked"]) == (None, 0, 3)


def test_a_step_record_is_finite_json(tiny_tokenizer: Any, pool: RewardPool) -> None:
    renderer = ChatRenderer(tiny_tokenizer)
    make = partial(SingleTurn, renderer, pool)
    rolled = rollout(Dictated(renderer, "1", "22"), tasks("1"), make, group_size=2, sampling=None, pool=pool)
    stats = EngineStats(prefill_tokens=30, cached_tokens=10, decode_tokens=3, prefill_seconds=2.0)
    trained = {"loss": math.nan, "grad_norm": math.inf, "train/tokens": 50.0}
    record = step_record(
        3, rolled, trained, stats, {"time/train": 2.0, "time/step": 5.0}, {"data/epoch": 0.5}
    )
    assert record["loss"] is None
    assert record["grad_norm"] is None
    assert record["kv/hit_rate"] == 0.25
    assert record["perf/train_tok_s"] == 25.0
    assert record["perf/prefill_tok_s"] == 15.0
    assert record["reward"] == 0.5
    json.dumps(record, allow_nan=False)


def test_the_clock_sums_parts() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.part("a"):
            pass
    clock.add("b", 3.0)
    clock.add("b", 4.0)
    found = clock.metrics()
    assert found["time/b"] == 7.0
    assert 0 <= found["time/a"] <= found["time/step"] < 60
