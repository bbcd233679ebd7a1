"""`hetero bench attention`: one new sequence (prefill, training), or one token each of many (decoding)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from hetero.bench.case import Settings, Work, contexts, record
from hetero.bench.machine import Machine
from hetero.bench.memory import num_copies
from hetero.bench.shapes import attention_shape
from hetero.bench.timing import check, time_calls, time_pairs
from hetero.errors import ArgumentError
from hetero.kernels import cpu, ops, reference
from hetero.kernels.batch import KV_BLOCK, AttentionBatch, KVLayer

BACKWARD = 2.5
"""Products of backward over those of forward: five for two, the scores computed again."""


def cases(settings: Settings, machine: Machine) -> Iterator[dict[str, Any]]:
    """Check and time every (instruction set, number of tokens).

    Raises:
        WrongResultError: a result differs from the reference. CapacityError: the cache does not fit.
    """
    if settings.context and settings.backward:
        raise ArgumentError("--context decodes from a cache, which has no backward; drop one of the two")
    for ctx in contexts(settings, machine):
        with cpu.using(ctx):
            for tokens in settings.tokens:
                made = Decode(settings, tokens) if settings.context else Prefill(settings, tokens)
                extra: dict[str, Any] = {"context": settings.context}
                made.check()
                if settings.against:
                    args = (settings.budget, machine.threads, settings.against)
                    times, paired = time_pairs(made.call, made.peer, *args)
                    extra |= paired
                else:
                    times = time_calls(made.call, settings.budget)
                args_of = (settings.shape, tokens, settings, machine, ctx.isa, times, made.work())
                yield record("attention", *args_of) | extra


def _random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _visible(length: int, window: int) -> float:
    """(query, key) pairs of a causal sequence."""
    full = min(length, window or length)
    return full * (full + 1) / 2 + (length - full) * full


class Prefill:
    """`tokens` new tokens of one sequence, in the training layout."""

    def __init__(self, settings: Settings, tokens: int) -> None:
        self.settings, self.tokens = settings, tokens
        self.shape = shape = attention_shape(settings.shape)
        heads = ((shape.heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, shape.values))
        self.q, self.k, self.v = (_random(tokens, *size, seed=i) for i, size in enumerate(heads))
        self.dout = _random(tokens, shape.heads, shape.values, seed=3)
        self.peers = tuple(x.to(settings.peer_dtype) for x in (self.q, self.k, self.v, self.dout))
        self.batch = AttentionBatch.packed([tokens])
        self.options: dict[str, Any] = {"scale": shape.dim**-0.5, "window": shape.window or None}

    def call(self, _: int) -> None:
        backward = self.settings.backward
        q, k, v = (x.detach().requires_grad_(backward) for x in (self.q, self.k, self.v))
        out = ops.attention(q, k, v, self.batch, **self.options)
        if backward:
            out.backward(self.dout)

    def peer(self, _: int) -> None:
        backward = self.settings.backward
        q, k, v = (x.detach().requires_grad_(backward) for x in self.peers[:3])
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if backward:
            out.backward(self.peers[3].transpose(0, 1)[None])

    def check(self) -> None:
        """The last rows against the reference: they see all the others."""
        few = min(self.tokens, 8)
        ours = tuple(x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        exact = tuple(x.float().requires_grad_() for x in (self.q, self.k, self.v))
        last = AttentionBatch(
            q_start=torch.tensor([self.tokens - few, self.tokens], dtype=torch.int32),
            kv_len=self.batch.kv_len,
            kv_rows=self.batch.kv_rows,
            kv_start=self.batch.kv_start,
        )
        got = ops.attention(ours[0], ours[1], ours[2], self.batch, **self.options)[-few:]
        want = reference.attention(exact[0], exact[1], exact[2], last, **self.options)[-few:]
        check("the output of attention", got, want)
        if self.settings.backward:
            dout = self.dout[-few:]
            gradients = (
                torch.autograd.grad(got, ours, dout),
                torch.autograd.grad(want, exact, dout.float()),
            )
            floor = 0.05 * float(dout[0].norm())  # of a single position, dq and dk are zero
            for name, mine, theirs in zip("qkv", *gradients, strict=True):
                what = f"d{name} of attention"
                check(what, mine.flatten(1), theirs.flatten(1), tolerance=0.03, floor=floor)

    def work(self) -> Work:
        shape, passes = self.shape, 1 + (BACKWARD if self.settings.backward else 0)
        flops = 2 * shape.heads * (shape.dim + shape.values) * _visible(self.tokens, shape.window)
        rows = sum(x.numel() for x in (self.q, self.k, self.v, self.dout))
        return Work(2 * rows * (2 if self.settings.backward else 1), passes * flops)


class Decode:
    """One new token for each of `tokens` sequences that have `context` positions, itself included, in the
    paged cache."""

    def __init__(self, settings: Settings, tokens: int) -> None:
        self.settings, self.tokens, self.context = settings, tokens, settings.context
        self.shape = shape = attention_shape(settings.shape)
        self.options: dict[str, Any] = {"scale": shape.dim**-0.5, "window": shape.window or None}
        blocks = -(-self.context // KV_BLOCK)
        sizes = (tokens * blocks, shape.kv_heads, shape.dim, shape.values)
        empty = KVLayer.zeros(1, *sizes[1:])
        copies = num_copies(
            empty.bytes_per_block * sizes[0], empty.bytes_per_block * sizes[0], settings.rotate
        )
        self.pools = [KVLayer.zeros(*sizes) for _ in range(copies)]
        for seed, pool in enumerate(self.pools):
            for cache in (pool.k, pool.v):
                cache.copy_(_random(*cache.shape[1:], seed=seed)[None])
        tables = torch.arange(sizes[0], dtype=torch.int32).view(tokens, blocks)
        slots = tables[:, -1].long() * KV_BLOCK + (self.context - 1) % KV_BLOCK
        self.batch = AttentionBatch(
            q_start=torch.arange(tokens + 1, dtype=torch.int32),
            kv_len=torch.full((tokens,), self.context, dtype=torch.int32),
            block_tables=tables,
            slots=slots,
        )
        heads = ((shape.heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, shape.values))
        self.q, self.k, self.v = (_random(tokens, *size, seed=i) for i, size in enumerate(heads))
        self.peers = self._peers(copies) if settings.against else []
        self.peer_q = self.q[:, :, None].to(settings.peer_dtype)

    def _peers(self, copies: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = self.shape
        sizes = [(self.tokens, shape.kv_heads, self.context, d) for d in (shape.dim, shape.values)]
        dtype = self.settings.peer_dtype
        return [
            (_random(*sizes[0], seed=i).to(dtype), _random(*sizes[1], seed=i).to(dtype))
            for i in range(max(1, copies // 2))
        ]

    def call(self, i: int) -> torch.Tensor:
        pool = self.pools[i % len(self.pools)]
        return ops.paged_attention(self.q, self.k, self.v, pool, self.batch, **self.options)

    def peer(self, i: int) -> None:
        k, v = self.peers[i % len(self.peers)]
        with torch.no_grad():
            functional.scaled_dot_product_attention(self.peer_q, k, v, enable_gqa=True)

    def check(self) -> None:
        """Every head of the first sequences against the reference."""
        few = min(self.tokens, 4)
        got = self.call(0)[:few]
        batch = AttentionBatch(
            q_start=self.batch.q_start[: few + 1],
            kv_len=self.batch.kv_len[:few],
            block_tables=None if self.batch.block_tables is None else self.batch.block_tables[:few],
            slots=None if self.batch.slots is None else self.batch.slots[:few],
        )
        q, k, v = (x[:few] for x in (self.q, self.k, self.v))
        want = reference.paged_attention(q.float(), k, v, self.pools[0], batch, **self.options)
        check("the output of paged attention", got, want)

    def work(self) -> Work:
        shape, seen = self.shape, min(self.context, self.shape.window or self.context)
        size = shape.dim + shape.values
        return Work(
            2.0 * self.tokens * seen * shape.kv_heads * size, 2.0 * self.tokens * seen * shape.heads * size
        )
