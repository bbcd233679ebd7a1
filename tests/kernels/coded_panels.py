"""Coded panels read from their bytes alone, and the sums that kernels of fp32 make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.kernels.cpu import PackedWeight, padded

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
]
TABLES = {"mxfp4": E2M1, "nf4": NF4, "q4_1": range(16)}
"""Of four-bit codes; the others are signed integers."""

WHOLE = ("int8", "int8_asym", "q8_0", "int4", "int4_asym", "mxfp4", "q4_0", "q4_1")
"""Formats whose codes are whole numbers: rows are made whole numbers too."""


class Panels:
    """One packed weight, padded: codes [N, K] as numbers, scales and minima [N, K / 32] fp32."""

    def __init__(self, weight: PackedWeight) -> None:
        how = weight.packing
        self.name, self.has_minima = (
            how.format.name,
            how.format.scale_bits == 32 and how.format.scale_rows == 1,
        )
        four_bits = how.format.bits == 4
        n, k = padded(weight.n), padded(weight.k)
        slab, group = 512 if four_bits else 1024, how.group_size
        scale_bytes = {"fp8": 4, "mxfp4": 32}.get(self.name, 128 if self.has_minima else 64)
        groups_per_run = max(1, 64 // scale_bytes)
        self.codes, self.scales, self.minima = (torch.zeros(n, c) for c in (k, k // 32, k // 32))
        panels = weight.data.view(torch.uint8).view(n // 32, -1)
        at = 0
        for first in range(0, k, groups_per_run * group):
            last = min(k, first + groups_per_run * group)
            for start in range(first, last, 32):
                self.codes[:, start : start + 32] = self._slab(panels[:, at : at + slab], four_bits)
                at += slab
            for i, start in enumerate(range(first, last, group)):
                own = panels[:, at + i * scale_bytes : at + (i + 1) * scale_bytes]
                slabs = slice(start // 32, -(-min(last, start + group) // 32))
                scales = self._scales(own)
                self.scales[:, slabs] = scales[0][:, None]
                self.minima[:, slabs] = scales[1][:, None]
            at += max(64, scale_bytes)
        assert at == panels.shape[1]

    def _slab(self, slab: Tensor, four_bits: bool) -> Tensor:
        """[panels, bytes] -> codes [N, 32] as numbers."""
        if self.name == "fp8":
            codes = slab.reshape(-1, 32, 32).transpose(1, 2).reshape(-1, 32)
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        if not four_bits:
            return slab.reshape(-1, 8, 32, 4).transpose(1, 2).reshape(-1, 32).float() - 128
        nibbles = torch.stack([slab & 15, slab >> 4], -1).reshape(-1, 4, 32, 8)  # byte by byte
        codes = nibbles.transpose(1, 2).reshape(-1, 32)
        return torch.tensor(list(TABLES.get(self.name, range(-8, 8))), dtype=torch.float32)[codes.long()]

    def _scales(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """[panels, bytes] -> scales and minima [N]."""
        own = own.contiguous()
        if self.name == "fp8":
            scales = own.view(torch.float32).expand(-1, 32).reshape(-1)
        elif self.name == "mxfp4":
            scales = (own.reshape(-1).int() << 23).view(torch.float32)
        elif self.name == "int8":
            bits = own.view(torch.int16).reshape(-1).int() & 0xFFFF
            scales = ((bits << 15) | 0x4000).view(torch.float32)
        else:
            half = torch.float16 if self.name.startswith("q") else torch.bfloat16
            both = own.view(half).float()
            if self.has_minima:
                return both[:, :32].reshape(-1), both[:, 32:].reshape(-1)
            scales = both.reshape(-1)
        return scales, torch.zeros_like(scales)

    def weights(self) -> Tensor:
        """Codes times scales, and minima: fp64 [N, K], not rounded."""
        scales, minima = (each.double().repeat_interleave(32, 1) for each in (self.scales, self.minima))
        return self.codes.double() * scales + minima

    def product(self, x: Tensor) -> Tensor:
        """x [T, K] times the weight: fp32 [T, N padded], in the order of digits.inl.h or slabs.inl.h."""
        x = torch.nn.functional.pad(x.double(), (0, self.codes.shape[1] - x.shape[1]))
        slabs = x.unflatten(1, (-1, 32)), self.codes.double().unflatten(1, (-1, 32))
        total = torch.zeros(x.shape[0], self.codes.shape[0])
        for slab in range(self.scales.shape[1]):
            scale, minimum = self.scales[:, slab].double(), self.minima[:, slab].double()
            own, codes = (each[:, slab] for each in slabs)
            if self.name in WHOLE:
                own = whole(own)
                if self.has_minima:
                    total = fused(own.sum(1, keepdim=True), minimum, total)
                total = fused((own @ codes.T).float().double(), scale, total)
                continue
            factors = (
                (codes * scale[:, None] + minimum[:, None]).float().double() if self.has_minima else codes
            )
            sums = torch.zeros_like(total)
            for k in range(32):
                sums = fused(own[:, k : k + 1], factors[:, k], sums)
            total = (total + sums) if self.has_minima else fused(sums.double(), scale, total)
        return total


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c: exact in fp64, rounded once to fp32."""
    return (a * b + c.double()).float()


def whole(x: Tensor) -> Tensor:
    """Slabs of rows [T, 32] fp64, rounded to 2^-13 of the power of two in the largest of each."""
    exponent = x.abs().amax(1, keepdim=True).frexp().exponent - 1
    unit = torch.full_like(x[:, :1], 2.0) ** (exponent.clamp(min=-100) - 13)
    return (x / unit).round() * unit
