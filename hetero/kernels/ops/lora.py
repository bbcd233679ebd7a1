"""LoraFactors: the trainable low-rank factors of a linear layer, and their packed copies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hetero.kernels.cpu.linear import PackedLora
from hetero.kernels.cpu.packed import PackedWeight, pack


class PackedCopies:
    """Packed bf16 copies of fp32 masters, made anew when the optimiser has written a master in place.

    Rollout and training read the same copy, so they see the same weights bit for bit.
    """

    def __init__(self) -> None:
        self._key: tuple[tuple[int, int], ...] = ()
        self._copies: list[PackedWeight] = []

    def get(self, *masters: torch.Tensor) -> list[PackedWeight]:
        key = tuple((master.data_ptr(), master._version) for master in masters)
        if key != self._key:
            self._copies = [pack(master.detach().cpu()) for master in masters]
            self._key = key
        return self._copies


@dataclass(slots=True, eq=False)
class LoraFactors:
    """y += scale * B (A x), on top of a frozen weight [N, K].

    Attributes:
        a: [r, K] fp32 parameter; b: [N, r] fp32 parameter. Computed with in bf16; gradients are fp32.
        scale: alpha / rank.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    _copies: PackedCopies = field(default_factory=PackedCopies, repr=False)

    def packed(self) -> PackedLora:
        a, b = self._copies.get(self.a, self.b)
        return PackedLora(a, b, self.scale)
