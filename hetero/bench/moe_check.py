"""What the experts must compute, on a few rows, from the plain reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from hetero.bench.shapes import MoeShape
from hetero.bench.timing import TOLERANCE, check
from hetero.experts import ExpertStore
from hetero.kernels import ops, reference
from hetero.kernels.ops import ExpertLoraFactors
from hetero.kernels.ops.expert_lora import FACTORS

REFERENCE_BYTES = 10**9
"""fp32 weights that the reference may hold at once; one row's experts in any case."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call: x [T, H] bf16, expert ids and weights [T, top_k], and the gradient of the output [T, H]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    dout: torch.Tensor


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's results on `rows`: out and dx [rows, H], and gradients of the factors by name, of the
    `used` experts alone, when only those rows have a gradient."""

    rows: torch.Tensor
    used: torch.Tensor
    out: torch.Tensor
    dx: torch.Tensor
    dweights: torch.Tensor
    factors: dict[str, torch.Tensor] = field(default_factory=dict)


def expect(
    shape: MoeShape,
    layer: ExpertStore,
    tensors: tuple[torch.Tensor, torch.Tensor],
    inputs: Inputs,
    lora: ExpertLoraFactors | None,
) -> Expected:
    """Compute the reference in fp32 from gate_up and down as they are computed with (`tensors`)."""
    num_rows = max(1, REFERENCE_BYTES // (4 * shape.weights * shape.top_k))
    rows = torch.linspace(0, inputs.x.shape[0] - 1, min(num_rows, inputs.x.shape[0], 8)).long()
    used, ids = inputs.ids[rows].unique(return_inverse=True)
    x = inputs.x[rows].float().requires_grad_()
    weights = inputs.weights[rows].clone().requires_grad_()
    own = {name: _of(factor, used).clone().requires_grad_() for name, factor in _named(lora).items()}
    biases = [None if b is None else b[used] for b in (layer.gate_up_bias, layer.down_bias)]
    out = reference.experts(
        tensors[0][used].float(),
        tensors[1][used].float(),
        x,
        ids,
        weights,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        activation=shape.activation,
        limit=shape.limit,
        lora=own,
        scale=1.0 if lora is None else lora.scale,
    )
    dx, dweights, *gradients = torch.autograd.grad(
        out, (x, weights, *own.values()), inputs.dout[rows].float()
    )
    return Expected(rows, used, out.detach(), dx, dweights, dict(zip(own, gradients, strict=True)))


def _named(lora: ExpertLoraFactors | None) -> dict[str, torch.Tensor]:
    tensors = () if lora is None else zip(FACTORS, lora.tensors(), strict=True)
    return {name: factor for name, factor in tensors if factor is not None}


def _of(factor: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return factor.detach()[used] if factor.ndim == 3 else factor.detach()


def check_forward(
    layer: ExpertStore, inputs: Inputs, lora: ExpertLoraFactors | None, expected: Expected
) -> None:
    """Raises WrongResultError."""
    with torch.no_grad():
        out = ops.experts(layer, inputs.x, inputs.ids, inputs.weights, lora)
    check("the output of moe", out[expected.rows], expected.out)


def check_backward(
    layer: ExpertStore, inputs: Inputs, lora: ExpertLoraFactors | None, expected: Expected, keep: bool
) -> None:
    """One backward whose output gradient is zero but for the expected rows. Raises WrongResultError."""
    x = inputs.x.clone().requires_grad_()
    weights = inputs.weights.clone().requires_grad_()
    out = ops.experts(layer, x, inputs.ids, weights, lora, keep=keep)
    check("the output of moe", out[expected.rows], expected.out)
    factors = _named(lora)
    dout = of_expected_rows(inputs, expected).dout
    dx, dweights, *gradients = torch.autograd.grad(out, (x, weights, *factors.values()), dout)
    check_gradients("moe", dx, dweights, dict(zip(factors, gradients, strict=True)), expected)


def of_expected_rows(inputs: Inputs, expected: Expected) -> Inputs:
    """The inputs with an output gradient that is zero but for the expected rows."""
    dout = torch.zeros_like(inputs.dout)
    dout[expected.rows] = inputs.dout[expected.rows]
    return replace(inputs, dout=dout)


def check_gradients(
    whose: str,
    dx: torch.Tensor,
    dweights: torch.Tensor,
    factors: dict[str, torch.Tensor],
    expected: Expected,
    slack: float = 1.0,
) -> None:
    """Compare what a backward from `of_expected_rows` gave; `slack` times as much is allowed as ours may err.
    Raises WrongResultError."""
    check(f"dx of {whose}", dx[expected.rows], expected.dx, tolerance=slack * TOLERANCE)
    # Dot products: what cancels in them leaves more of the rounding.
    own, want = dweights[expected.rows], expected.dweights
    check(f"the gradient of {whose}'s expert weights", own, want, tolerance=slack * 0.06)
    for name, want in expected.factors.items():
        own = factors[name][expected.used] if factors[name].ndim == 3 else factors[name]
        # One row per matrix: a single neuron's gradient may be next to nothing but rounding.
        what = f"the gradient of {whose}'s {name}"
        check(what, own.flatten(-2), want.flatten(-2), tolerance=slack * 0.03)
