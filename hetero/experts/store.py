"""The routed experts of one layer, packed once in RAM."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.errors import ShapeError
from hetero.experts.stack import PackedStack
from hetero.formats import packing
from hetero.kernels import ops
from hetero.kernels.cpu import PackedExperts, PackedWeight


class ExpertStore:
    """Gate, up and down projections of every expert of one layer, in the kernels' packing.

    Attributes:
        gate_up: [E, 2I, H], gate rows before up rows.
        down: [E, H, I].
        gate_up_bias, down_bias: fp32 [E, 2I] and [E, H], or None.
        activation, limit, alpha: how gate and up combine (see `hetero.kernels.ops.gated_activation`).
        format: name of the weight format; "q4_k, q6_k" where gate_up and down differ.
        packed: the same as the kernels take it.

    Raises: ShapeError when the sizes do not fit together.
    """

    def __init__(
        self,
        gate_up: PackedWeight,
        down: PackedWeight,
        *,
        activation: str = "silu",
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        limit: float | None = None,
        alpha: float | None = None,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.gate_up_bias = _bias("gate_up_bias", gate_up_bias, gate_up)
        self.down_bias = _bias("down_bias", down_bias, down)
        self.limit = limit
        self.alpha = alpha
        self.format = ", ".join(dict.fromkeys(w.packing.format.name for w in (gate_up, down)))
        self.packed = PackedExperts(
            gate_up,
            down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            activation=activation,
            limit=limit,
            alpha=alpha,
        )

    @classmethod
    def from_tensors(
        cls,
        gate_up: Tensor,
        down: Tensor,
        format: str = "bf16",
        *,
        group_size: int | None = None,
        symmetric: bool | None = None,
        scale_search: str = "max",
        activation: str = "silu",
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        limit: float | None = None,
        alpha: float | None = None,
    ) -> ExpertStore:
        """Pack gate_up [E, 2I, H] (gate rows first) and down [E, H, I]; bf16 or fp32, left untouched.

        format, group_size, symmetric and scale_search are described at `hetero.formats.packing`.

        Raises: ShapeError.
        """
        if gate_up.ndim != 3 or down.ndim != 3:
            raise ShapeError(
                f"expected [E, 2I, H] and [E, H, I], got {tuple(gate_up.shape)}, {tuple(down.shape)}"
            )
        how = packing(format, group_size, symmetric, scale_search)
        packed = []
        for stack, parts in ((gate_up, 2), (down, 1)):
            e, n, k = stack.shape
            target = PackedStack(e, n, k, how, parts=parts)
            for index, weight in enumerate(stack):
                target.put(index, weight)
            packed.append(target.packed)
        return cls(
            *packed,
            activation=activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            limit=limit,
            alpha=alpha,
        )

    @property
    def num_experts(self) -> int:
        return self.gate_up.e

    @property
    def hidden_size(self) -> int:
        return self.gate_up.k

    @property
    def intermediate_size(self) -> int:
        return self.down.k

    @property
    def nbytes(self) -> int:
        """Bytes that the store keeps in RAM, padding and biases included."""
        biases = (self.gate_up_bias, self.down_bias)
        return self.gate_up.nbytes + self.down.nbytes + sum(b.nbytes for b in biases if b is not None)

    @torch.no_grad()
    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, H], expert_ids [T, K] int64 (-1: no expert), expert_weights [T, K] -> [T, H], without
        autograd."""
        return ops.experts(self, x, expert_ids, expert_weights)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """(gate_up [E, 2I, H], down [E, H, I]) in bf16, quantised weights rounded to nearest."""
        return self.gate_up.unpack(), self.down.unpack()

    def __repr__(self) -> str:
        return (
            f"ExpertStore(experts={self.num_experts}, hidden={self.hidden_size}, "
            f"intermediate={self.intermediate_size}, format={self.format}, {self.nbytes / 2**20:.1f} MiB)"
        )


def _bias(name: str, bias: Tensor | None, weight: PackedWeight) -> Tensor | None:
    if bias is None:
        return None
    if tuple(bias.shape) != (weight.e, weight.n):
        raise ShapeError(f"{name} has shape {tuple(bias.shape)}, expected {(weight.e, weight.n)}")
    return bias.to("cpu", torch.float32).contiguous()
