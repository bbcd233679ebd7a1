"""The expert kernels: one layer's packed experts, forward and backward, with LoRA."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.cpu.checks import as_bf16, expect
from hetero.kernels.cpu.context import Context, context
from hetero.kernels.cpu.packed import PackedWeight, padded
from hetero.kernels.cpu.rows import gate_of
from hetero.kernels.cpu.runs import Runs, listed


class PackedExperts:
    """E gated experts of one layer: out = down(act(gate(x), up(x))).

    Args:
        gate_up: packed [E, 2I, H] with parts=2, gate rows first. down: packed [E, H, I], maybe in another
            format.
        gate_up_bias, down_bias: fp32 [E, 2I] and [E, H], or None.
        activation, limit, alpha: see `hetero.kernels.ops.gated_activation`.
    """

    def __init__(
        self,
        gate_up: PackedWeight,
        down: PackedWeight,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
    ) -> None:
        self.num_experts, self.hidden, self.intermediate = down.e, down.n, down.k
        got = (gate_up.e, gate_up.n, gate_up.k, gate_up.parts)
        if got != (down.e, 2 * down.k, down.n, 2):
            raise ShapeError(
                f"gate_up is [{gate_up.e}, {gate_up.n}, {gate_up.k}] in {gate_up.parts} parts and down "
                f"[{down.e}, {down.n}, {down.k}]; expected [E, 2I, H] in 2 parts and [E, H, I]"
            )
        self.gate_up, self.down = gate_up, down
        self._biases = (
            _pad_bias("gate_up_bias", gate_up_bias, (down.e, 2 * down.k), parts=2),
            _pad_bias("down_bias", down_bias, (down.e, down.n), parts=1),
        )
        self.handle = _C.Experts(
            down.e,
            down.n,
            down.k,
            gate_up.data,
            down.data,
            gate_up.format,
            down.format,
            *self._biases,
            gate_of(activation, limit, alpha),
        )


def _pad_bias(
    name: str, bias: torch.Tensor | None, shape: tuple[int, int], parts: int
) -> torch.Tensor | None:
    if bias is None:
        return None
    expect(name, bias, shape)
    rows = bias.detach().float().view(shape[0], parts, -1)
    return functional.pad(rows, (0, padded(rows.shape[2]) - rows.shape[2])).flatten(1).contiguous()


class PackedExpertLora:
    """Low-rank factors of every expert, packed.

    Args:
        gate_up_a: [2 r_pad, H] (shared by the experts) or a stack of E: gate's rows from 0, up's from
            r_pad on, r_pad being r rounded up to 32.
        gate_up_b: stack of E [2I, r] with parts=2. down_a: stack of E [r, I]. down_b: [H, r] or a stack of E.
            Both of a pair are None when the LoRA has no such part.
        scale: alpha / rank.
    """

    def __init__(
        self,
        experts: PackedExperts,
        gate_up_a: PackedWeight | None,
        gate_up_b: PackedWeight | None,
        down_a: PackedWeight | None,
        down_b: PackedWeight | None,
        scale: float,
    ) -> None:
        self._alive = (gate_up_a, gate_up_b, down_a, down_b)
        self.gate_up_rank = gate_up_b.k if gate_up_b is not None else 0
        self.down_rank = down_a.n if down_a is not None else 0
        self.shared_gate_up_a = gate_up_a is not None and not gate_up_a.stacked
        self.shared_down_b = down_b is not None and not down_b.stacked
        self.handle = _C.ExpertLora(
            experts.handle,
            _data(gate_up_a),
            _data(gate_up_b),
            _data(down_a),
            _data(down_b),
            self.gate_up_rank,
            self.down_rank,
            self.shared_gate_up_a,
            self.shared_down_b,
            scale,
        )


def _data(weight: PackedWeight | None) -> torch.Tensor | None:
    return None if weight is None else weight.data


class LoraGrads(NamedTuple):
    """fp32 gradients to add to, in the shapes of the factors; None where not wanted."""

    gate_a: torch.Tensor | None = None
    gate_b: torch.Tensor | None = None
    up_a: torch.Tensor | None = None
    up_b: torch.Tensor | None = None
    down_a: torch.Tensor | None = None
    down_b: torch.Tensor | None = None


def _check_inputs(experts: PackedExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    expect("x", x, (None, experts.hidden), torch.bfloat16, torch.float32)
    expect("expert_ids", ids, (x.shape[0], None), torch.int64, torch.int32)
    expect("expert_weights", weights, tuple(ids.shape), torch.float32, torch.bfloat16, torch.float16)


def experts_forward(
    experts: PackedExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    lora: PackedExpertLora | Runs[PackedExpertLora] | None = None,
    *,
    save: bool = False,
    keep: bool = True,
    out: torch.Tensor | None = None,
    ctx: Context | None = None,
) -> tuple[torch.Tensor, Any]:
    """x [T, H], ids [T, top_k] (-1: skip), weights [T, top_k] -> (out [T, H] in the dtype of x, saved).

    A token's experts are added in ascending order in fp32 and rounded once; a row's bits depend on that row
    alone, and not on which run of `lora` it is in; an expert's weights are read once for all runs. `saved` is
    for `experts_backward` (None unless `save`); with `keep` it holds the pre-activations in
    bf16, without it backward computes them again, to the same bits.

    Raises:
        ShapeError: shapes or dtypes do not fit, or an id is no expert; nothing has been computed then.
    """
    _check_inputs(experts, x, ids, weights)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    handle = (ctx or context()).handle
    ids, weights = ids.long().contiguous(), weights.detach().float().contiguous()
    parts, ends = listed(lora, x.shape[0])
    handles = [None if part is None else part.handle for part in parts]
    try:
        saved = _C.experts_forward(
            handle, experts.handle, handles, ends, as_bf16(x), ids, weights, out, save, keep
        )
    except ValueError as error:
        raise ShapeError(str(error)) from None
    return out, saved


def experts_backward(
    saved: Any,
    experts: PackedExperts,
    x: torch.Tensor,
    dout: torch.Tensor,
    lora: PackedExpertLora | None = None,
    *,
    dx: torch.Tensor | None = None,
    dweights: torch.Tensor | None = None,
    grads: LoraGrads | None = None,
    ctx: Context | None = None,
) -> None:
    """Gradients of one forward, any number of times and in any order of forwards.

    dout [T, H] is rounded to bf16. dx [T, H] (bf16 or fp32) and dweights [T, top_k] fp32 are overwritten,
    `grads` are added to; what is None is not computed.
    """
    expect("dout", dout, tuple(x.shape))
    handle = (ctx or context()).handle
    factors = None if lora is None else lora.handle
    stacks = [None if g is None else g.view(-1, *g.shape[-2:]) for g in grads or LoraGrads()]
    _C.experts_backward(
        handle, saved, experts.handle, factors, as_bf16(x), as_bf16(dout), dx, dweights, *stacks
    )
