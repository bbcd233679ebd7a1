"""Weights whose codes exist already: sliced, packed without a second rounding, or decoded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hetero import _C
from hetero.errors import ShapeError
from hetero.formats import Packing
from hetero.kernels.cpu.checks import expect
from hetero.kernels.cpu.context import context
from hetero.kernels.cpu.packed import PANEL, PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight [N, K], or E of them, in the codes of a checkpoint.

    Attributes:
        packing: the format whose codes these are.
        codes: uint8 [.., N, K], one code per byte.
        scales, minima: the bits of a scale as int32 [.., ceil(N / scale_rows), ceil(K / group)]; minima only
            for formats that have them.
        scale_rows: rows that share a scale: 1, or (fp8) a multiple of 32.
    """

    packing: Packing
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    scale_rows: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def pack(self, parts: int = 1) -> PackedWeight:
        """The packed weight; parts as of `PackedWeight`. Raises ShapeError."""
        return pack_codes(
            self.packing, self.codes, self.scales, self.minima, parts=parts, scale_rows=self.scale_rows
        )

    def dequantize(self) -> torch.Tensor:
        """The bf16 weight [.., N, K] that the kernels compute with when these codes are packed."""
        return self.pack().unpack()

    def rows(self, start: int, stop: int) -> CodedWeight:
        """Rows start..stop - 1 of N. Raises ShapeError when they begin inside a panel that shares a scale."""
        first, per = start, self.scale_rows
        scales = self.scales
        if start % per:  # a block of scales spans the cut: give every panel its own
            if start % PANEL:
                raise ShapeError(
                    f"rows {start} to {stop} begin inside a block of {per} rows that share a scale, and not "
                    f"at a multiple of {PANEL}; choose another format, which decodes them first"
                )
            scales = scales.repeat_interleave(per // PANEL, -2)
            per = PANEL
        kept = slice(first // per, -(-stop // per))
        return replace(
            self,
            codes=self.codes[..., start:stop, :],
            scales=scales[..., kept, :],
            minima=None if self.minima is None else self.minima[..., kept, :],
            scale_rows=per,
        )

    def every_second(self, first: int) -> CodedWeight:
        """Rows first, first + 2, ... of N. Raises ShapeError for rows that share scales."""
        if self.scale_rows != 1:
            raise ShapeError("gate and up rows alternate inside blocks that share a scale")
        minima = None if self.minima is None else self.minima[..., first::2, :]
        return replace(
            self, codes=self.codes[..., first::2, :], scales=self.scales[..., first::2, :], minima=minima
        )


def put_codes(packed: PackedWeight, index: int, part: int, weight: CodedWeight) -> None:
    """Pack `weight` [N / parts, K] as one part of matrix number `index` of `packed`. Raises ShapeError."""
    expect("codes", weight.codes, (packed.n // packed.parts, packed.k), torch.uint8)
    _pack_codes(packed, packed.part(index, part), 1, weight)


def pack_codes(
    packing: Packing,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None = None,
    *,
    parts: int = 1,
    scale_rows: int = 1,
) -> PackedWeight:
    """Pack codes; arguments as of `CodedWeight`, parts as of `PackedWeight`.

    Raises:
        ShapeError: shapes or dtypes do not fit the format.
    """
    if codes.dim() not in (2, 3) or codes.dtype != torch.uint8:
        raise ShapeError(f"codes are {codes.dtype} {list(codes.shape)}; expected uint8 [N, K] or [E, N, K]")
    n, k = codes.shape[-2:]
    e = codes.shape[0] if codes.dim() == 3 else 1
    packed = PackedWeight.empty(e, n, k, stacked=codes.dim() == 3, parts=parts, packing=packing)
    weight = CodedWeight(packing, codes, scales, minima, scale_rows)
    _pack_codes(packed, packed.data, e * parts, weight)
    return packed


def _pack_codes(packed: PackedWeight, panels: torch.Tensor, runs: int, weight: CodedWeight) -> None:
    """Pack `runs` runs of rows that are padded each on its own into `panels`."""
    rows = packed.n // packed.parts
    of_scales = -(-rows // weight.scale_rows)

    def split(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        if tensor.numel() != runs * rows * tensor.shape[-1]:
            raise ShapeError(f"scales are {list(tensor.shape)}; expected {runs} times {rows} rows")
        return tensor.to("cpu").contiguous().view(runs, rows, -1)

    try:
        _C.pack_codes(
            context().handle,
            packed.format,
            split(weight.codes, rows),
            split(weight.scales, of_scales),
            None if weight.minima is None else split(weight.minima, of_scales),
            weight.scale_rows,
            panels,
        )
    except ValueError as error:
        raise ShapeError(str(error)) from None
