"""LoraFactors: the trainable low-rank factors of a linear layer, and their packed copies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hetero.kernels.cpu.linear import PackedLora
from hetero.kernels.cpu.packed import PackedWeight, pack
from hetero.kernels.cpu.runs import Runs


class PackedCopies:
    """Packed bf16 copies of fp32 masters, made anew when the optimiser has written a master in place.

    Rollout and training read the same copy, so they see the same weights bit for bit.
    """

    def __init__(self) -> None:
        self._key: tuple[tuple[int, int], ...] = ()
        self._copies: list[PackedWeight] = []

    def get(self, *masters: torch.Tensor) -> list[PackedWeight]:
        key = _key(masters)
        if key != self._key:
            self._copies = [pack(master.detach().cpu()) for master in masters]
            self._key = key
        return self._copies

    def set(self, copies: list[PackedWeight], *masters: torch.Tensor) -> None:
        """Take the copies of masters that hold the same values."""
        self._copies, self._key = copies, _key(masters)


def _key(masters: tuple[torch.Tensor, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((master.data_ptr(), master._version) for master in masters)


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

    def frozen(self, dtype: torch.dtype = torch.bfloat16) -> LoraFactors:
        """A copy that stays as it is when the masters change, for computing in `dtype`, without gradient."""
        a, b = (master.detach().to(dtype, copy=True) for master in (self.a, self.b))
        copy = LoraFactors(a, b, self.scale)
        if dtype == torch.bfloat16 and not a.is_cuda:
            copy._copies.set(self._copies.get(self.a, self.b), a, b)
        return copy


def packed_lora(lora: LoraFactors | Runs[LoraFactors] | None) -> PackedLora | Runs[PackedLora] | None:
    """What the kernels take."""
    if isinstance(lora, Runs):
        return Runs(tuple(None if part is None else part.packed() for part in lora.parts), lora.ends)
    return None if lora is None else lora.packed()
