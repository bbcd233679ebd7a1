"""A stack of weights that is packed one matrix at a time, from plain weights or from a checkpoint's codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero.errors import ShapeError
from hetero.formats import BF16, Packing
from hetero.kernels.cpu import CodedWeight, PackedWeight, put_codes


class PackedStack:
    """A `PackedWeight` of E matrices [N, K] that is filled one matrix at a time; gate and up have parts=2.

    Args:
        packing: how to pack; None takes codes in their own format and plain weights as bf16.

    Raises: ShapeError for a matrix of another shape, or weights that `packing` cannot hold.
    """

    def __init__(self, e: int, n: int, k: int, packing: Packing | None = BF16, *, parts: int = 1) -> None:
        self._shape, self._parts, self._packing = (e, n, k), parts, packing
        self._as_they_come = packing is None
        self._packed: PackedWeight | None = None
        self._filled = [False] * e

    @property
    def packed(self) -> PackedWeight:
        """The stack, allocated when it is first needed: a model that loads layer by layer grows layer by
        layer."""
        if self._packed is None:
            self._packed = PackedWeight.empty(*self._shape, parts=self._parts, packing=self._packing or BF16)
        return self._packed

    def put(self, index: int, weight: Tensor | CodedWeight) -> None:
        """Pack `weight` [N, K] (codes, or any float dtype on any device) as matrix `index`."""
        rows = self._shape[1] // self._parts
        taken = self._taken(weight)
        if isinstance(taken, CodedWeight):
            for part in range(self._parts):
                put_codes(self.packed, index, part, taken.rows(part * rows, (part + 1) * rows))
        else:
            self.packed.set(index, taken.contiguous())
        self._filled[index] = True

    def put_parts(self, index: int, weights: Sequence[Tensor | CodedWeight]) -> None:
        """Pack matrix `index` from its parts, each [N / parts, K]."""
        for part, weight in enumerate(weights):
            taken = self._taken(weight)
            if isinstance(taken, CodedWeight):
                put_codes(self.packed, index, part, taken)
            else:
                self.packed.set_part(index, part, taken)
        self._filled[index] = True

    def missing(self) -> list[int]:
        """Matrices that have not come yet."""
        return [i for i, filled in enumerate(self._filled) if not filled]

    def _taken(self, weight: Tensor | CodedWeight) -> Tensor | CodedWeight:
        """`weight` as it is when the stack holds such codes, else in bf16. ShapeError for a mixture."""
        own = weight.packing if isinstance(weight, CodedWeight) else BF16
        if self._as_they_come and self._packed is None:
            self._packing = own
        packing = self.packed.packing
        same = (packing.format, packing.group_size) == (own.format, own.group_size)
        if self._as_they_come and not same:
            raise ShapeError(
                f"experts of one layer come as {packing.format.name} and as {own.format.name}; name the "
                "format to pack them in, such as experts='int8'"
            )
        if isinstance(weight, CodedWeight):
            return weight if same else weight.dequantize()
        return weight.to("cpu", torch.bfloat16)
