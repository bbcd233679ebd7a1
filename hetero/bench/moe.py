"""`hetero bench moe`: one layer of routed experts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from hetero.bench import against_torch
from hetero.bench.case import Settings, Work, contexts, record
from hetero.bench.contention import time_among_rivals
from hetero.bench.machine import Machine
from hetero.bench.moe_check import Inputs, check_backward, check_forward, expect
from hetero.bench.moe_layers import Weights, layer_copies, lora_factors
from hetero.bench.peers import make_peer, peer_bytes
from hetero.bench.routing import calls_to_see_all, deal
from hetero.bench.shapes import MoeShape, moe_shape
from hetero.bench.timing import Times, time_calls, time_pairs
from hetero.formats import packing
from hetero.kernels import cpu, ops


def cases(settings: Settings, machine: Machine) -> Iterator[dict[str, Any]]:
    """Check and time every (instruction set, number of tokens).

    Raises:
        WrongResultError: a result differs from the reference. CapacityError: the layer does not fit.
    """
    bench = Bench(settings, machine.threads)
    for ctx in contexts(settings, machine):
        with cpu.using(ctx):
            for tokens in settings.tokens:
                yield bench.case(tokens, machine, ctx.isa)


class Bench:
    """The layers, the inputs of every case, and what the first layer must compute from them."""

    def __init__(self, settings: Settings, threads: int) -> None:
        self.settings, self.shape = settings, moe_shape(settings.shape)
        shape = self.shape
        how = packing(settings.format, settings.group_size)
        theirs = peer_bytes(settings, shape.weights, shape.E)
        copies = layer_copies(shape, how, settings.rotate, theirs)
        weights = Weights(shape, settings.seed)
        self.inputs = {tokens: _inputs(shape, tokens, settings.seed) for tokens in settings.tokens}
        rank = settings.lora_rank
        self.loras = [lora_factors(shape, rank, i) if rank else None for i in range(copies)]
        self.layers = [weights.store(how)]
        coded = (weights.gate_up, weights.down) if settings.format == "bf16" else self.layers[0].dequantize()
        self.expected = {
            tokens: expect(shape, self.layers[0], coded, inputs[0], self.loras[0])
            for tokens, inputs in self.inputs.items()
        }
        self.layers += [weights.store(how) for _ in range(copies - 1)]
        weights.gate_up, weights.down = coded  # the peer has the numbers that our codes stand for
        self.peer = make_peer(settings, weights, self.loras, threads)

    def case(self, tokens: int, machine: Machine, isa: str) -> dict[str, Any]:
        settings, inputs, expected = self.settings, self.inputs[tokens], self.expected[tokens]
        if settings.backward:
            keep = not settings.recompute
            check_backward(self.layers[0], inputs[0], self.loras[0], expected, keep)
            call = self.train
        else:
            check_forward(self.layers[0], inputs[0], self.loras[0], expected)
            call = self.forward
        self.forward_seconds: list[float] = []
        extra: dict[str, Any] = {"rotated_gb": sum(layer.nbytes for layer in self.layers) / 1e9}
        if self.peer is None:
            times = time_calls(lambda i: call(tokens, i), settings.budget)
        else:
            self.peer.check(inputs[0], expected)
            times, paired = time_pairs(
                lambda i: call(tokens, i),
                lambda i: self._peer(tokens, i),
                settings.budget,
                machine.threads,
                settings.against or "",
                self.peer.PAUSE,
            )
            extra |= paired | {"peer_format": settings.peer_format}
        if settings.rivals:
            extra |= time_among_rivals(lambda i: call(tokens, i), settings.budget, settings.rivals)
        if settings.backward:
            extra["forward_ms"] = 1e3 * Times(self.forward_seconds[-len(times.seconds) :]).median
            extra["recompute"] = settings.recompute
        line = record("moe", settings.shape, tokens, settings, machine, isa, times, self.work(tokens))
        return line | extra

    def work(self, tokens: int) -> Work:
        """The weights of the experts that a call meets, once per pass; products with the weights alone."""
        layer, inputs, passes = self.layers[0], self.inputs[tokens], 2 if self.settings.backward else 1
        met = sum(call.ids.unique().numel() for call in inputs) / len(inputs)
        flops = 2 * self.shape.weights * tokens * self.shape.top_k
        return Work(passes * met * layer.nbytes / layer.num_experts, passes * flops)

    def _next(self, tokens: int, i: int) -> tuple[int, Inputs]:
        copy, inputs = i % len(self.layers), self.inputs[tokens]
        return copy, inputs[i // len(self.layers) % len(inputs)]

    def forward(self, tokens: int, i: int) -> None:
        copy, call = self._next(tokens, i)
        with torch.no_grad():
            ops.experts(self.layers[copy], call.x, call.ids, call.weights, self.loras[copy])

    def _peer(self, tokens: int, i: int) -> None:
        assert self.peer is not None
        copy, call = self._next(tokens, i)
        self.peer.run(call, copy)

    def train(self, tokens: int, i: int) -> None:
        copy, call = self._next(tokens, i)
        lora = self.loras[copy]
        against_torch.clear_gradients(lora)
        x, weights = call.x.detach().requires_grad_(), call.weights.detach().requires_grad_()
        start = time.perf_counter()
        keep = not self.settings.recompute
        out = ops.experts(self.layers[copy], x, call.ids, weights, lora, keep=keep)
        self.forward_seconds.append(time.perf_counter() - start)
        out.backward(call.dout)


def _inputs(shape: MoeShape, tokens: int, seed: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(seed)
    calls = calls_to_see_all(tokens, shape.top_k, shape.E)
    made = []
    for ids in deal(tokens, shape.top_k, shape.E, calls, seed):
        x, dout = (
            torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16) for _ in range(2)
        )
        weights = torch.rand(tokens, shape.top_k, generator=generator) + 0.1
        made.append(Inputs(x, ids, weights / weights.sum(-1, keepdim=True), dout))
    return made
