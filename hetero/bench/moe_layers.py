"""The layers of a Mixture-of-Experts benchmark: random weights, as many copies as calls rotate over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.bench.memory import num_copies
from hetero.bench.shapes import MoeShape
from hetero.experts import ExpertStore
from hetero.formats import Packing
from hetero.kernels.ops import ExpertLoraFactors

Loras = Sequence[ExpertLoraFactors | None]
"""Low-rank factors of every copy of a layer."""


class Weights:
    """Random weights of one layer: gate_up [E, 2I, H] and down [E, H, I] bf16, biases fp32 or None."""

    def __init__(self, shape: MoeShape, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        e, h, i = shape.E, shape.hidden, shape.intermediate
        self.gate_up = _stack(e, 2 * i, h, generator)
        self.down = _stack(e, h, i, generator)
        self.gate_up_bias = torch.randn(e, 2 * i, generator=generator) if shape.bias else None
        self.down_bias = torch.randn(e, h, generator=generator) if shape.bias else None

    def store(self, how: Packing) -> ExpertStore:
        return ExpertStore.from_tensors(
            self.gate_up,
            self.down,
            how.format.name,
            group_size=how.group_size if how.format.group_sizes else None,
            activation=self.shape.activation,
            limit=self.shape.limit,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )


def _stack(e: int, n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    # One random matrix, turned a little further for every expert: drawing each would take minutes.
    first = (torch.randn(n * k, generator=generator) / k**0.5).to(torch.bfloat16)
    stack = torch.empty(e, n * k, dtype=torch.bfloat16)
    for index, matrix in enumerate(stack):
        shift = index * 7919 % (n * k)
        matrix[shift:], matrix[:shift] = first[: n * k - shift], first[n * k - shift :]
    return stack.view(e, n, k)


def layer_copies(shape: MoeShape, how: Packing, rotate: int, peer_bytes: int = 0) -> int:
    """Copies of the layer to rotate over; `peer_bytes` more per copy are the peer's. Raises CapacityError."""
    e, h, i = shape.E, shape.hidden, shape.intermediate
    own = e * (how.nbytes(2 * i, h) + how.nbytes(h, i))
    source = 2 * e * shape.weights
    # The source stays while copies are packed; the reference may need what a store dequantises to.
    return num_copies(own + peer_bytes, source if how.format.name == "bf16" else 2 * source, rotate)


def lora_factors(shape: MoeShape, rank: int, seed: int) -> ExpertLoraFactors:
    """Random factors, the outer ones shared by the experts, all of them trainable."""
    e, h, i = shape.E, shape.hidden, shape.intermediate
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "gate_a": (rank, h),
        "gate_b": (e, i, rank),
        "up_a": (rank, h),
        "up_b": (e, i, rank),
        "down_a": (e, rank, i),
        "down_b": (h, rank),
    }
    made = {}
    for name, size in sizes.items():
        factor = torch.randn(size, generator=generator) / size[-1] ** 0.5
        made[name] = factor.requires_grad_()
    return ExpertLoraFactors(**made, scale=0.5)
