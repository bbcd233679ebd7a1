"""PackedWeight: a weight matrix, or a stack of them, in the panel layout that every kernel reads."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.formats import BF16, Packing
from hetero.kernels.cpu.checks import expect
from hetero.kernels.cpu.context import context

PANEL = 32
"""Columns of a panel; N and K are padded with zeros to multiples of it."""


OWN_MAPPING = 1 << 19
"""Elements from which panels get a memory mapping of their own (1 MiB)."""


def padded(extent: int) -> int:
    """`extent` rounded up to a multiple of PANEL."""
    return -(-extent // PANEL) * PANEL


def _panels(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for `size` elements of two bytes.

    Large stacks get a mapping of their own, in huge pages where there are any: in the allocator's heap they
    would be strewn among the short-lived tensors of loading, whose holes no later stack fills. With several
    memory nodes pages are small: a node's share of one matrix is often less than a huge page.
    """
    if size < OWN_MAPPING:
        return torch.empty(size, dtype=dtype)
    memory = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        advice = mmap.MADV_HUGEPAGE if context().nodes == 1 else mmap.MADV_NOHUGEPAGE
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype)


@dataclass(slots=True, eq=False)
class PackedWeight:
    """E weights [N, K] (y = x W^T) in panels, padded with zeros: bf16 [E, N/32, K/2, 32, 2], or codes and
    scales as csrc/formats/format.h lays them out.

    Attributes:
        e, n, k: matrices in the stack (1 for a single weight), rows (outputs) and columns (inputs) of each.
        data: the panels, one flat CPU tensor: bf16, or 16-bit words of codes and scales.
        stacked: whether `unpack` gives [E, N, K] rather than [N, K].
        parts: equal runs of the N rows that are padded each on its own (gate and up: 2).
        packing: the format and how its scales are chosen.
        format: what the kernels need to know of the format; None for bf16.
    """

    e: int
    n: int
    k: int
    data: torch.Tensor
    stacked: bool = False
    parts: int = 1
    packing: Packing = BF16
    format: Any = field(init=False)

    def __post_init__(self) -> None:
        self.format = _format(self.packing)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def n_pad(self) -> int:
        """Rows of one matrix with the padding."""
        return self.parts * padded(self.n // self.parts)

    @classmethod
    def empty(
        cls, e: int, n: int, k: int, *, stacked: bool = True, parts: int = 1, packing: Packing = BF16
    ) -> PackedWeight:
        """Uninitialised panels for `e` weights, to be filled one by one with `set`."""
        if min(e, n, k) < 1 or n % parts:
            raise ShapeError(
                f"a packed weight needs positive sizes and N in {parts} equal parts, got E={e}, N={n}, K={k}"
            )
        if k % packing.format.columns:
            raise ShapeError(
                f"{packing.format.name} holds rows of whole blocks of {packing.format.columns}, got K={k}"
            )
        size = e * parts * padded(n // parts) // PANEL * _panel_size(packing, k)
        dtype = torch.bfloat16 if packing == BF16 else torch.uint16
        return cls(e, n, k, _panels(size, dtype), stacked, parts, packing)

    def set(self, index: int, weight: torch.Tensor) -> None:
        """Pack `weight` [N, K] (bf16, or fp32 rounded to nearest even) as matrix number `index`."""
        expect("weight", weight, (self.n, self.k), torch.bfloat16, torch.float32)
        if not 0 <= index < self.e:
            raise ShapeError(f"index is {index}; the stack has {self.e} matrices")
        size = self.n_pad // PANEL * _panel_size(self.packing, self.k)
        self._fill(weight.detach(), self.data[index * size : (index + 1) * size])

    def set_part(self, index: int, part: int, weight: torch.Tensor) -> None:
        """Pack `weight` [N / parts, K] as one part of matrix number `index`: gate (0) or up (1)."""
        expect("weight", weight, (self.n // self.parts, self.k), torch.bfloat16, torch.float32)
        self._fill(weight.detach(), self.part(index, part))

    def fill(self, weights: torch.Tensor) -> None:
        """Pack all of `weights` [E, N, K]."""
        expect("weight", weights, (self.e, self.n, self.k), torch.bfloat16, torch.float32)
        self._fill(weights.detach(), self.data)

    def unpack(self) -> torch.Tensor:
        """The weight in plain row-major bf16, quantised ones rounded to nearest: [N, K], or [E, N, K] for a
        stack."""
        weight = torch.empty(self.e * self.parts, self.n // self.parts, self.k, dtype=torch.bfloat16)
        if self.format is None:
            _C.unpack(context().handle, self.data, weight)
        else:
            _C.dequantize(context().handle, self.format, self.data, weight)
        weight = weight.view(self.e, self.n, self.k)
        return weight if self.stacked else weight[0]

    def part(self, index: int, part: int) -> torch.Tensor:
        """The panels of one part of one matrix."""
        if not (0 <= index < self.e and 0 <= part < self.parts):
            raise ShapeError(f"part {part} of matrix {index}: the stack has {self.e} of {self.parts} parts")
        size = padded(self.n // self.parts) // PANEL * _panel_size(self.packing, self.k)
        start = (index * self.parts + part) * size
        return self.data[start : start + size]

    def _fill(self, weights: torch.Tensor, piece: torch.Tensor) -> None:
        rows = self.n // self.parts
        weights = weights.reshape(-1, rows, self.k).contiguous()
        if self.format is None:
            _C.pack(context().handle, weights, piece)
            return
        try:
            search = self.packing.scale_search == "mse"
            _C.quantize(context().handle, self.format, weights, search, piece)
        except ValueError as error:
            raise ShapeError(str(error)) from None


def _format(packing: Packing) -> Any:
    return None if packing == BF16 else _C.Format(packing.format.name, packing.group_size)


def _panel_size(packing: Packing, k: int) -> int:
    """Elements of two bytes in one panel."""
    format = _format(packing)
    return PANEL * padded(k) if format is None else format.panel_bytes(padded(k)) // 2


def pack(weight: torch.Tensor, parts: int = 1, packing: Packing = BF16) -> PackedWeight:
    """Pack a CPU weight [N, K], or a stack [E, N, K], of bf16 or fp32: rounded to nearest even, or quantised.

    Raises:
        ShapeError: wrong number of dimensions, another dtype, an empty extent, or a weight that is not finite
            and has to be quantised.
    """
    if weight.dim() not in (2, 3):
        raise ShapeError(f"weight is {list(weight.shape)}; expected [N, K] or [E, N, K]")
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    packed = PackedWeight.empty(*stack.shape, stacked=weight.dim() == 3, parts=parts, packing=packing)
    packed.fill(stack)
    return packed
