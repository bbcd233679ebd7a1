"""`hetero bench rows`: what works on one row at a time: norms, routers, log-probabilities, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from hetero.bench.case import Settings, Work, contexts, record
from hetero.bench.machine import Machine
from hetero.bench.shapes import RowShape, row_shape
from hetero.bench.timing import check, time_calls, time_pairs
from hetero.kernels import cpu, ops, reference

EPS = 1e-5
KEY = 7


def cases(settings: Settings, machine: Machine) -> Iterator[dict[str, Any]]:
    """Check and time every (instruction set, operation, number of tokens).

    Raises:
        WrongResultError: a result differs from the reference.
    """
    shape = row_shape(settings.shape)
    made: list[type[Norm | Router | Sampling]] = (
        [Norm, Router] if settings.backward else [Norm, Router, Sampling]
    )
    for ctx in contexts(settings, machine):
        with cpu.using(ctx):
            for kind in made:
                for tokens in settings.tokens:
                    yield _case(kind(shape, tokens, settings), settings, machine, ctx.isa)


def _case(made: Norm | Router | Sampling, settings: Settings, machine: Machine, isa: str) -> dict[str, Any]:
    made.check()
    extra: dict[str, Any] = {}
    if settings.against:
        times, extra = time_pairs(made.call, made.peer, settings.budget, machine.threads, settings.against)
    else:
        times = time_calls(made.call, settings.budget)
    label = f"{settings.shape}/{made.name}"
    return record("rows", label, made.tokens, settings, machine, isa, times, made.work()) | extra


def _normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Norm:
    """RMS norm of [T, hidden] bf16."""

    name = "rms_norm"

    def __init__(self, shape: RowShape, tokens: int, settings: Settings) -> None:
        self.tokens, self.backward = tokens, settings.backward
        self.x, self.dy = (_normal(i, tokens, shape.hidden).to(torch.bfloat16) for i in range(2))
        self.weight = (1 + 0.1 * _normal(2, shape.hidden)).to(torch.bfloat16)
        self.peers = tuple(x.to(settings.peer_dtype) for x in (self.x, self.dy, self.weight))

    def call(self, _: int) -> torch.Tensor:
        x = self.x.detach().requires_grad_(self.backward)
        y = ops.rms_norm(x, self.weight, EPS)
        if self.backward:
            y.backward(self.dy)
        return y

    def peer(self, _: int) -> None:
        x, dy, weight = self.peers
        x = x.detach().requires_grad_(self.backward)
        y = functional.rms_norm(x, weight.shape, weight, EPS)
        if self.backward:
            y.backward(dy)

    def check(self) -> None:
        check(
            "the output of rms_norm",
            self.call(0),
            reference.rms_norm(self.x.float(), self.weight.float(), EPS),
        )

    def work(self) -> Work:
        passes = 2.5 if self.backward else 1  # backward reads x and dy and writes dx
        return Work(passes * 4.0 * self.x.numel(), passes * 4.0 * self.x.numel())


class Router:
    """Softmax over [T, E] fp32 and its top k."""

    name = "router"

    def __init__(self, shape: RowShape, tokens: int, settings: Settings) -> None:
        self.tokens, self.backward, self.top_k = tokens, settings.backward, shape.top_k
        self.logits = _normal(0, tokens, shape.E)
        self.dy = _normal(1, tokens, shape.top_k)

    def call(self, _: int) -> torch.Tensor:
        logits = self.logits.detach().requires_grad_(self.backward)
        values, _ids = ops.topk(ops.softmax(logits), self.top_k)
        if self.backward:
            values.backward(self.dy)
        return values

    def peer(self, _: int) -> None:
        logits = self.logits.detach().requires_grad_(self.backward)
        values = functional.softmax(logits, dim=-1).topk(self.top_k, dim=-1).values
        if self.backward:
            values.backward(self.dy)

    def check(self) -> None:
        want = functional.softmax(self.logits.double(), dim=-1).topk(self.top_k, dim=-1).values
        check("the output of the router", self.call(0), want)

    def work(self) -> Work:
        passes = 2 if self.backward else 1
        return Work(passes * 8.0 * self.logits.numel(), passes * 10.0 * self.logits.numel())


class Sampling:
    """One draw from each of [T, vocab] fp32 logits, with its log-probability."""

    name = "sample"

    def __init__(self, shape: RowShape, tokens: int, settings: Settings) -> None:
        self.tokens = tokens
        self.logits = 3 * _normal(0, tokens, shape.vocab)
        ones = torch.ones(tokens)
        keys = torch.arange(4 * tokens, dtype=torch.int64).view(tokens, 4) + KEY
        self.options = (ones, ones, torch.zeros(tokens, dtype=torch.int32), 0 * ones, keys)

    def call(self, _: int) -> torch.Tensor:
        return ops.sample(self.logits, *self.options)[1]

    def peer(self, _: int) -> None:
        logp = functional.log_softmax(self.logits, dim=-1)
        logp.gather(1, torch.multinomial(logp.exp(), 1))

    def check(self) -> None:
        ids, logp, _ = ops.sample(self.logits, *self.options)
        want = functional.log_softmax(self.logits.double(), dim=-1).gather(1, ids[:, None])
        check("the log-probability of sample", logp[None], want.T)

    def work(self) -> Work:
        return Work(4.0 * self.logits.numel(), 5.0 * self.logits.numel())
