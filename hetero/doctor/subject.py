"""The model under examination, what it is asked, and how two answers are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hetero.doctor.finding import Finding, judge
from hetero.engine.engine import Engine
from hetero.engine.generation import Generation
from hetero.engine.params import SamplingParams
from hetero.engine.sequence import Completion
from hetero.errors import ModelError
from hetero.kernels.batch import KV_BLOCK
from hetero.models.forward import forward_hidden
from hetero.models.kv import KVPool
from hetero.models.lora import bump_adapter_version, lora_parameters
from hetero.models.probe import scoring_batch
from hetero.train.batch import TrainSample
from hetero.train.trainer import Trainer

RANK, ALPHA = 4, 8.0
"""Of the adapter that the doctor attaches."""
SLOW = 0.005
"""Seconds per token of a forward from which on the doctor asks less."""
CLOSE, SHARE = 0.05, 0.95
"""Where bits are not promised (dense parts on a GPU): so near must so many log-probabilities be."""


@dataclass(frozen=True)
class Subject:
    """A loaded model and the conversation that every check repeats.

    Attributes:
        exact: equal bits are promised: dense parts on the CPU kernels.
        prompts: two equal ones, one that begins alike, a short one; the long ones cross a KV block.
        max_tokens: sampled per prompt.
    """

    model: PreTrainedModel
    exact: bool
    prompts: list[list[int]]
    max_tokens: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Subject:
        """Choose the work so that a slow model is asked less."""
        placement: Any = model.hetero
        vocab = int(model.config.get_text_config(decoder=True).vocab_size)
        rng = random.Random(0)
        ids = [rng.randrange(vocab) for _ in range(3 * KV_BLOCK)]
        with torch.no_grad():
            for _ in range(2):  # the first forward pays for what is made once
                start = time.perf_counter()
                forward_hidden(model, scoring_batch([ids[:KV_BLOCK]], model.device))
        slow = time.perf_counter() - start > SLOW * KV_BLOCK
        shared = ids[: KV_BLOCK + 4]
        prompts = [shared, shared, shared[:-2] + ids[40 : 41 if slow else 60], ids[-5:]]
        return cls(model, placement.dense != "torch", prompts, 3 if slow else 8)

    @contextmanager
    def engine(self, *, num_blocks: int | None = None, **options: Any) -> Iterator[Engine]:
        """An engine with a KV pool just large enough for the conversation, or of `num_blocks`."""
        blocks = num_blocks or 2 * sum(-(-(len(p) + self.max_tokens) // KV_BLOCK) for p in self.prompts)
        with Engine(self.model, kv_memory=blocks * KVPool.block_bytes(self.model), **options) as engine:
            yield engine

    def ask(
        self, engine: Engine, prompts: Sequence[Sequence[int]] | None = None, max_tokens: int | None = None
    ) -> list[Completion]:
        """Sample answers, each from its own random stream whatever runs beside it.

        Raises ModelError when the engine gives one up.
        """
        params = SamplingParams(max_tokens=max_tokens or self.max_tokens, ignore_eos=True)
        done = engine.generate(self.prompts if prompts is None else prompts, params)
        for completion in done:
            if completion.finish_reason == "abort":
                raise ModelError(
                    f"The engine gave a sequence up: {completion.message}. Look for NaN in the checkpoint's "
                    "weights, and load it in Transformers to compare."
                )
        return done

    def begin(self, engine: Engine) -> Generation:
        """Queue the conversation; its answers are those of `ask`."""
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        return engine.begin(self.prompts, params)

    def samples(self, completions: Sequence[Completion]) -> list[TrainSample]:
        """What the trainer gets of them: equal prompts are one group."""
        return [
            TrainSample(p, c.token_ids, c.logprobs, advantage=(-1.0) ** i, group=self.prompts.index(p))
            for i, (p, c) in enumerate(zip(self.prompts, completions, strict=True))
        ]

    def scores(self, completions: Sequence[Completion], micro_batch_tokens: int) -> list[Completion]:
        """The same completions with the log-probabilities that the trainer computes."""
        trainer = Trainer(self.model, micro_batch_tokens=micro_batch_tokens)
        scores = trainer.score(self.samples(completions))
        return [replace(c, logprobs=s) for c, s in zip(completions, scores, strict=True)]

    def compare(
        self, check: str, pairs: Sequence[tuple[Sequence[Completion], Sequence[Completion]]], fix: str
    ) -> Finding:
        """Whether both sides of each pair have the same tokens and log-probabilities; the value is
        max |delta logp|."""
        gaps: list[float] = []
        same_tokens = True
        for one, two in pairs:
            for a, b in zip(one, two, strict=True):
                same_tokens &= a.token_ids == b.token_ids
                same = next(
                    (i for i, (s, t) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if s != t),
                    len(a.token_ids),
                )
                gaps += [abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True)]
        return self.judge(check, gaps, fix, same_tokens=same_tokens)

    def judge(self, check: str, gaps: list[float], fix: str, *, same_tokens: bool = True) -> Finding:
        """Whether differences of log-probabilities are what is promised: none, or rounding."""
        if any(gap != gap for gap in gaps):
            return Finding(check, False, "NaN", "The model's log-probabilities are no numbers. " + fix)
        largest = max(gaps, default=0.0)
        if not self.exact:
            close = sum(gap < CLOSE for gap in gaps) >= SHARE * len(gaps)
            return judge(check, close, largest, "More than rounding: " + fix)
        if not same_tokens:
            return Finding(check, False, "other tokens are drawn", fix)
        return judge(check, largest == 0.0, largest, fix)


def stir(model: PreTrainedModel, seed: int, size: float = 0.02) -> None:
    """Move every factor of the adapter, so that it has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(size * torch.randn(master.shape, generator=generator).to(master.device))
    bump_adapter_version(model)
