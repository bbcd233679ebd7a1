"""PackedWeight: a weight matrix, or a stack of them, in the panel layout that every kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.cpu.checks import expect
from hetero.kernels.cpu.context import context

PANEL = 32
"""Columns of a panel; N and K are padded with zeros to multiples of it."""


def padded(extent: int) -> int:
    """`extent` rounded up to a multiple of PANEL."""
    return -(-extent // PANEL) * PANEL


@dataclass(slots=True, eq=False)
class PackedWeight:
    """E weights [N, K] (y = x W^T) in bf16 panels [E, N/32, K/2, 32, 2], padded with zeros.

    Attributes:
        e, n, k: matrices in the stack (1 for a single weight), rows (outputs) and columns (inputs) of each.
        data: the panels, one flat bf16 CPU tensor.
        stacked: whether `unpack` gives [E, N, K] rather than [N, K].
    """

    e: int
    n: int
    k: int
    data: torch.Tensor
    stacked: bool = False

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @classmethod
    def empty(cls, e: int, n: int, k: int, *, stacked: bool = True) -> PackedWeight:
        """Uninitialised panels for `e` weights, to be filled one by one with `set`."""
        if min(e, n, k) < 1:
            raise ShapeError(f"a packed weight needs positive sizes, got E={e}, N={n}, K={k}")
        return cls(e, n, k, torch.empty(e * padded(n) * padded(k), dtype=torch.bfloat16), stacked)

    def set(self, index: int, weight: torch.Tensor) -> None:
        """Pack `weight` [N, K] (bf16, or fp32 rounded to nearest even) as matrix number `index`."""
        expect("weight", weight, (self.n, self.k), torch.bfloat16, torch.float32)
        size = padded(self.n) * padded(self.k)
        piece = self.data[index * size : (index + 1) * size]
        _C.pack(context().handle, weight.detach().contiguous().unsqueeze(0), piece)

    def unpack(self) -> torch.Tensor:
        """The weight in plain row-major bf16: [N, K], or [E, N, K] for a stack."""
        weight = torch.empty(self.e, self.n, self.k, dtype=torch.bfloat16)
        _C.unpack(context().handle, self.data, weight)
        return weight if self.stacked else weight[0]


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack a CPU weight [N, K], or a stack [E, N, K], of bf16 or fp32 (rounded to nearest even).

    Raises:
        ShapeError: wrong number of dimensions, another dtype, or an empty extent.
    """
    if weight.dim() not in (2, 3):
        raise ShapeError(f"weight is {list(weight.shape)}; expected [N, K] or [E, N, K]")
    expect("weight", weight, tuple(weight.shape), torch.bfloat16, torch.float32)
    stack = weight.detach().contiguous()
    stack = stack if weight.dim() == 3 else stack.unsqueeze(0)
    packed = PackedWeight.empty(*stack.shape, stacked=weight.dim() == 3)
    _C.pack(context().handle, stack, packed.data)
    return packed
