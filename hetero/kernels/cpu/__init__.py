"""Typed wrappers of the C++ extension: the only importer of `hetero._C`."""

from __future__ import annotations

from hetero.kernels.batch import KV_BLOCK
from hetero.kernels.cpu.codes import CodedWeight, pack_codes, put_codes
from hetero.kernels.cpu.context import EXTENSION, Context, context, isa, isas, kernels, using
from hetero.kernels.cpu.experts import (
    LoraGrads,
    PackedExpertLora,
    PackedExperts,
    experts_backward,
    experts_forward,
)
from hetero.kernels.cpu.linear import LinearGrads, PackedLora, linear, linear_backward
from hetero.kernels.cpu.packed import PANEL, PackedWeight, pack, padded

__all__ = [
    "EXTENSION",
    "KV_BLOCK",
    "PANEL",
    "CodedWeight",
    "Context",
    "LinearGrads",
    "LoraGrads",
    "PackedExpertLora",
    "PackedExperts",
    "PackedLora",
    "PackedWeight",
    "context",
    "experts_backward",
    "experts_forward",
    "isa",
    "isas",
    "kernels",
    "linear",
    "linear_backward",
    "pack",
    "pack_codes",
    "padded",
    "put_codes",
    "using",
]
