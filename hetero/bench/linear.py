"""`hetero bench linear`: dense linears, one shape after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from hetero.bench.case import Settings, Work, contexts, record
from hetero.bench.machine import Machine
from hetero.bench.memory import num_copies
from hetero.bench.shapes import LinearShape, linear_shapes
from hetero.bench.timing import check, time_calls, time_pairs
from hetero.formats import packing
from hetero.kernels import cpu, ops, reference
from hetero.kernels.ops import LoraFactors


def cases(settings: Settings, machine: Machine) -> Iterator[dict[str, Any]]:
    """Check and time every (shape, instruction set, number of tokens).

    Raises:
        WrongResultError: a result differs from the reference. CapacityError: a weight does not fit.
    """
    for label, shape in linear_shapes(settings.shape).items():
        bench = Bench(shape, settings)
        for ctx in contexts(settings, machine):
            with cpu.using(ctx):
                for tokens in settings.tokens:
                    yield bench.case(label, tokens, machine, ctx.isa)


class Bench:
    """One weight in as many packed copies as calls rotate over, each with LoRA factors of its own."""

    def __init__(self, shape: LinearShape, settings: Settings) -> None:
        self.shape, self.settings, n, k = shape, settings, shape.N, shape.K
        generator = torch.Generator().manual_seed(settings.seed)
        source, form = 2 * n * k, packing(settings.format, settings.group_size)
        dtype = settings.peer_dtype
        copy = form.nbytes(n, k) + (dtype.itemsize * n * k if settings.against else 0)
        copies = num_copies(copy, 4 * source, settings.rotate)
        weight = (torch.randn(n, k, generator=generator) / k**0.5).to(torch.bfloat16)
        self.packed = [cpu.pack(weight, packing=form) for _ in range(copies)]
        self.weight = self.packed[0].unpack()
        self.peers = [self.weight.to(dtype, copy=True) for _ in range(copies if settings.against else 0)]
        self.loras = [self._lora(generator) for _ in range(copies)]
        self.rows = {
            tokens: [torch.randn(tokens, width, generator=generator).to(torch.bfloat16) for width in (k, n)]
            for tokens in settings.tokens
        }
        self.peer_rows = {tokens: [x.to(dtype) for x in rows] for tokens, rows in self.rows.items()}

    def _lora(self, generator: torch.Generator) -> LoraFactors | None:
        rank, shape = self.settings.lora_rank, self.shape
        if not rank:
            return None
        a = torch.randn(rank, shape.K, generator=generator) / shape.K**0.5
        b = torch.randn(shape.N, rank, generator=generator) / rank**0.5
        return LoraFactors(a.requires_grad_(), b.requires_grad_(), scale=0.5)

    def case(self, label: str, tokens: int, machine: Machine, isa: str) -> dict[str, Any]:
        settings = self.settings
        self.check(tokens)
        extra: dict[str, Any] = {"rotated_gb": sum(w.nbytes for w in self.packed) / 1e9}
        call = self.train if settings.backward else self.forward
        if settings.against:
            times, paired = time_pairs(
                lambda i: call(tokens, i),
                lambda i: self.peer(tokens, i),
                settings.budget,
                machine.threads,
                settings.against,
            )
            extra |= paired
        else:
            times = time_calls(lambda i: call(tokens, i), settings.budget)
        passes = 2 if settings.backward else 1
        flops = 2.0 * tokens * self.shape.N * self.shape.K
        work = Work(passes * self.packed[0].nbytes, passes * flops)
        return record("linear", label, tokens, settings, machine, isa, times, work) | extra

    def forward(self, tokens: int, i: int) -> torch.Tensor:
        copy = i % len(self.packed)
        with torch.no_grad():
            return ops.linear(self.rows[tokens][0], self.packed[copy], lora=self.loras[copy])

    def train(self, tokens: int, i: int) -> None:
        copy = i % len(self.packed)
        lora = self.loras[copy]
        if lora is not None:
            lora.a.grad = lora.b.grad = None
        x = self.rows[tokens][0].detach().requires_grad_()
        ops.linear(x, self.packed[copy], lora=lora).backward(self.rows[tokens][1])

    def peer(self, tokens: int, i: int) -> None:
        x = self.peer_rows[tokens][0].detach().requires_grad_(self.settings.backward)
        y = functional.linear(x, self.peers[i % len(self.peers)])
        lora = self.loras[i % len(self.peers)]
        if lora is not None:
            lora.a.grad = lora.b.grad = None
            a, b = lora.a.to(x.dtype), lora.b.to(x.dtype)
            y = y + lora.scale * functional.linear(functional.linear(x, a), b)
        if self.settings.backward:
            y.backward(self.peer_rows[tokens][1])

    def check(self, tokens: int) -> None:
        """Rows from begin to end against the reference, forward and, if it is timed, backward."""
        x, dy = self.rows[tokens]
        rows = torch.linspace(0, tokens - 1, min(tokens, 8)).long()
        lora = self.loras[0]
        own = [] if lora is None else [f.detach().requires_grad_() for f in (lora.a, lora.b)]
        exact = x[rows].float().requires_grad_()
        factors = None if lora is None else (own[0], own[1], lora.scale)
        want = reference.linear(exact, self.weight.float(), None, factors)
        check("the output of linear", self.forward(tokens, 0)[rows], want)
        if not self.settings.backward:
            return
        masked = torch.zeros_like(dy)
        masked[rows] = dy[rows]
        moved = x.clone().requires_grad_()
        mine = () if lora is None else (lora.a, lora.b)
        y = ops.linear(moved, self.packed[0], lora=lora)
        dx, *got = torch.autograd.grad(y, (moved, *mine), masked)
        want_dx, *wanted = torch.autograd.grad(want, (exact, *own), dy[rows].float())
        check("dx of linear", dx[rows], want_dx)
        for name, gradient, expected in zip(("da", "db"), got, wanted, strict=False):
            check(f"{name} of linear", gradient.flatten(), expected.flatten())
