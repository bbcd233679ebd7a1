"""The LM head: logits of a few rows, and log-probabilities of many without ever holding tokens x vocabulary.

`sample` and `token_logprobs` share their row kernel, and logits rows are independent: for the same hidden row
the log-probability that was sampled and the one that is trained on are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hetero.errors import ShapeError
from hetero.kernels.cpu import sampling
from hetero.kernels.cpu.checks import checked
from hetero.kernels.cpu.context import Context, context
from hetero.kernels.cpu.linear import LinearGrads, PackedLora, linear, linear_backward
from hetero.kernels.cpu.packed import PackedWeight
from hetero.kernels.cpu.runs import Runs
from hetero.kernels.ops.lora import LoraFactors, packed_lora

CHUNK_BYTES = 32 << 20
"""fp32 logits held at a time."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The head and the rows it is asked about, checked; everything that a chunk needs."""

    kernels: Context
    weight: PackedWeight
    bias: torch.Tensor | None
    factor: float
    softcap: float | None
    lora: PackedLora | None  # of one version: rows are cut in chunks here
    targets: torch.Tensor
    temperature: torch.Tensor

    def chunks(self) -> list[slice]:
        size = max(16, CHUNK_BYTES // (4 * self.weight.n) // 16 * 16)
        return [slice(i, i + size) for i in range(0, max(1, self.targets.shape[0]), size)]

    def logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([t, V] fp32, what linear_backward needs of the LoRA branch)."""
        x, xa = linear(hidden, self.weight, self.bias, self.lora, out_dtype=torch.float32, ctx=self.kernels)
        return sampling.cap_logits(self.kernels, x, self.factor, self.softcap), xa

    def backward(
        self,
        hidden: torch.Tensor,
        rows: slice,
        logits: torch.Tensor,
        xa: torch.Tensor | None,
        stats: sampling.TokenStats,
        gradient: torch.Tensor,
    ) -> LinearGrads:
        """d hidden [t, H] fp32, d lora a and d lora b of one chunk, given d logp."""
        dlogits = sampling.token_logprobs_backward(
            self.kernels,
            logits,
            self.targets[rows],
            self.temperature[rows],
            stats,
            gradient,
            self.factor,
            self.softcap,
        )
        return linear_backward(
            dlogits, self.weight, hidden, self.lora, xa, dx_dtype=torch.float32, ctx=self.kernels
        )


def _forward(head: _Head, hidden: torch.Tensor, slopes: torch.Tensor | None) -> sampling.TokenStats:
    """Statistics of all rows; with `slopes` [T, H] also d logp / d hidden, while the logits are there."""
    pieces = []
    for rows in head.chunks():
        logits, xa = head.logits(hidden[rows])
        stats = sampling.token_logprobs(head.kernels, logits, head.targets[rows], head.temperature[rows])
        pieces.append(stats)
        if slopes is not None:
            ones = torch.ones(logits.shape[0])
            grads = head.backward(hidden[rows], rows, logits, xa, stats, ones)
            if grads.dx is not None:
                slopes[rows] = grads.dx
    return sampling.TokenStats(*(torch.cat(column) for column in zip(*pieces, strict=True)))


class _FrozenHead(torch.autograd.Function):
    """Without LoRA the gradient is linear in d logp, row by row: forward computes the slopes while the logits
    are there."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: _Head) -> tuple[torch.Tensor, torch.Tensor]:
        slopes = torch.empty(hidden.shape)
        stats = _forward(head, hidden, slopes)
        ctx.save_for_backward(slopes)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(stats.entropy)
        return stats.logp, stats.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * gradient[:, None]).to(ctx.dtype), None


class _LoraHead(torch.autograd.Function):
    """With LoRA the factors' gradients mix the rows: backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, a: torch.Tensor, b: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats = _forward(head, hidden, None)
        ctx.head, ctx.factor_shapes = head, (a.shape, b.shape)
        ctx.save_for_backward(hidden, *stats)
        ctx.mark_non_differentiable(stats.entropy)
        return stats.logp, stats.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        head: _Head = ctx.head
        hidden, *columns = ctx.saved_tensors
        gradient, dx = gradient.contiguous(), torch.zeros(hidden.shape)
        da, db = (torch.zeros(shape) for shape in ctx.factor_shapes)
        for rows in head.chunks():
            logits, xa = head.logits(hidden[rows])
            stats = sampling.TokenStats(*(column[rows] for column in columns))
            grads = head.backward(hidden[rows], rows, logits, xa, stats, gradient[rows])
            for total, part in zip((dx[rows], da, db), grads, strict=True):
                if part is not None:
                    total += part
        return dx.to(hidden.dtype), da, db, None


def head_logits(
    hidden: torch.Tensor,
    head: PackedWeight,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    lora: LoraFactors | Runs[LoraFactors] | None = None,
) -> torch.Tensor:
    """Logits [B, V] fp32 of hidden [B, H] (bf16, or fp32 rounded to bf16), for `sample`; no gradient.

    logits = cap(logit_scale * (hidden W^T + bias)), cap(x) = softcap * tanh(x / softcap). `lora` as in
    `linear`.
    """
    kernels = context()
    packed = packed_lora(lora)
    with torch.no_grad():
        logits, _ = linear(hidden, head, bias, packed, out_dtype=torch.float32, ctx=kernels)
        return sampling.cap_logits(kernels, logits, logit_scale, softcap)


def token_logprobs(
    hidden: torch.Tensor,
    head: PackedWeight,
    targets: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    lora: LoraFactors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each row's target token under softmax(logits / temperature), and the entropy.

    Args:
        hidden: [T, H] bf16 or fp32 (rounded to bf16) on the CPU.
        head: packed [V, H], frozen.
        targets: [T] int64 in [0, V).
        temperature: a number or [T], positive.
        bias, logit_scale, softcap, lora: as in `head_logits`, but one version for all rows.

    Returns:
        (logp [T] fp32, differentiable with respect to hidden and the LoRA factors; entropy [T] fp32 in nats,
        without gradient).

    Raises:
        ShapeError: shapes, dtypes, devices or values are not as above.
    """
    num_tokens = hidden.shape[0]
    targets = checked("targets", targets, (num_tokens,), torch.int64)
    if num_tokens and (int(targets.min()) < 0 or int(targets.max()) >= head.n):
        raise ShapeError(f"targets hold {targets.min()} to {targets.max()}; expected ids in [0, {head.n})")
    scale = torch.as_tensor(temperature, dtype=torch.float32).expand(num_tokens).contiguous()
    if not bool((scale > 0.0).all()):
        raise ShapeError(f"temperature is {temperature}; expected positive values")
    packed = None if lora is None else lora.packed()
    state = _Head(context(), head, bias, logit_scale, softcap, packed, targets, scale)
    if torch.is_grad_enabled():
        if lora is not None and any(t.requires_grad for t in (hidden, lora.a, lora.b)):
            return _LoraHead.apply(hidden, lora.a, lora.b, state)
        if hidden.requires_grad:
            return _FrozenHead.apply(hidden, state)
    stats = _forward(state, hidden.detach(), None)
    return stats.logp, stats.entropy
