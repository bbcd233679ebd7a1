"""PackedWeight: a weight matrix, or a stack of them, in the panel layout that every kernel reads."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.kernels.cpu.checks import expect
from hetero.kernels.cpu.context import context

PANEL = 32
"""Columns of a panel; N and K are padded with zeros to multiples of it."""


OWN_MAPPING = 1 << 19
"""Elements from which panels get a memory mapping of their own (1 MiB)."""


def padded(extent: int) -> int:
    """`extent` rounded up to a multiple of PANEL."""
    return -(-extent // PANEL) * PANEL


def _panels(size: int) -> torch.Tensor:
    """Uninitialised memory for `size` bf16 elements.

    Large stacks get a mapping of their own, in huge pages where there are any: in the allocator's heap they
    would be strewn among the short-lived tensors of loading, whose holes no later stack fills.
    """
    if size < OWN_MAPPING:
        return torch.empty(size, dtype=torch.bfloat16)
    memory = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16)


@dataclass(slots=True, eq=False)
class PackedWeight:
    """E weights [N, K] (y = x W^T) in bf16 panels [E, N/32, K/2, 32, 2], padded with zeros.

    Attributes:
        e, n, k: matrices in the stack (1 for a single weight), rows (outputs) and columns (inputs) of each.
        data: the panels, one flat bf16 CPU tensor.
        stacked: whether `unpack` gives [E, N, K] rather than [N, K].
        parts: equal runs of the N rows that are padded each on its own (gate and up: 2).
    """

    e: int
    n: int
    k: int
    data: torch.Tensor
    stacked: bool = False
    parts: int = 1

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def n_pad(self) -> int:
        """Rows of one matrix with the padding."""
        return self.parts * padded(self.n // self.parts)

    @classmethod
    def empty(cls, e: int, n: int, k: int, *, stacked: bool = True, parts: int = 1) -> PackedWeight:
        """Uninitialised panels for `e` weights, to be filled one by one with `set`."""
        if min(e, n, k) < 1 or n % parts:
            raise ShapeError(
                f"a packed weight needs positive sizes and N in {parts} equal parts, got E={e}, N={n}, K={k}"
            )
        size = e * parts * padded(n // parts) * padded(k)
        return cls(e, n, k, _panels(size), stacked, parts)

    def set(self, index: int, weight: torch.Tensor) -> None:
        """Pack `weight` [N, K] (bf16, or fp32 rounded to nearest even) as matrix number `index`."""
        expect("weight", weight, (self.n, self.k), torch.bfloat16, torch.float32)
        if not 0 <= index < self.e:
            raise ShapeError(f"index is {index}; the stack has {self.e} matrices")
        size = self.n_pad * padded(self.k)
        self._fill(weight.detach(), self.data[index * size : (index + 1) * size])

    def set_part(self, index: int, part: int, weight: torch.Tensor) -> None:
        """Pack `weight` [N / parts, K] as one part of matrix number `index`: gate (0) or up (1)."""
        rows = self.n // self.parts
        expect("weight", weight, (rows, self.k), torch.bfloat16, torch.float32)
        if not (0 <= index < self.e and 0 <= part < self.parts):
            raise ShapeError(f"part {part} of matrix {index}: the stack has {self.e} of {self.parts} parts")
        size = padded(rows) * padded(self.k)
        start = (index * self.parts + part) * size
        self._fill(weight.detach(), self.data[start : start + size])

    def fill(self, weights: torch.Tensor) -> None:
        """Pack all of `weights` [E, N, K]."""
        expect("weight", weights, (self.e, self.n, self.k), torch.bfloat16, torch.float32)
        self._fill(weights.detach(), self.data)

    def unpack(self) -> torch.Tensor:
        """The weight in plain row-major bf16: [N, K], or [E, N, K] for a stack."""
        weight = torch.empty(self.e * self.parts, self.n // self.parts, self.k, dtype=torch.bfloat16)
        _C.unpack(context().handle, self.data, weight)
        weight = weight.view(self.e, self.n, self.k)
        return weight if self.stacked else weight[0]

    def _fill(self, weights: torch.Tensor, piece: torch.Tensor) -> None:
        rows = self.n // self.parts
        _C.pack(context().handle, weights.reshape(-1, rows, self.k).contiguous(), piece)


def pack(weight: torch.Tensor, parts: int = 1) -> PackedWeight:
    """Pack a CPU weight [N, K], or a stack [E, N, K], of bf16 or fp32 (rounded to nearest even).

    Raises:
        ShapeError: wrong number of dimensions, another dtype, or an empty extent.
    """
    if weight.dim() not in (2, 3):
        raise ShapeError(f"weight is {list(weight.shape)}; expected [N, K] or [E, N, K]")
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    packed = PackedWeight.empty(*stack.shape, stacked=weight.dim() == 3, parts=parts)
    packed.fill(stack)
    return packed
