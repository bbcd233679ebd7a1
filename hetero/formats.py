"""The table of weight formats: how many bits a weight takes and how its scales are laid out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store a weight matrix.

    Attributes:
        name: the name used in recipes and in `ExpertStore(format=...)`.
        bits: bits per weight, without scales.
        group_size: weights that share one scale along K; 0 when there are no scales.
        scale_bits: bits per scale.
    """

    name: str
    bits: int
    group_size: int = 0
    scale_bits: int = 0

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] matrix in this format, scales included, padding not."""
        scales = n * -(-k // self.group_size) * self.scale_bits if self.group_size else 0
        return (n * k * self.bits + scales) // 8


FORMATS: dict[str, Format] = {f.name: f for f in (Format("bf16", 16),)}
