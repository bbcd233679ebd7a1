"""K-quants of GGUF: blocks of 256 weights whose scales are small integers times a half for the block.

The layout of the blocks is that of llama.cpp's ggml-common.h (block_q4_K, block_q5_K, block_q6_K).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.errors import ShapeError
from hetero.formats import packing
from hetero.kernels.cpu import CodedWeight

SUPER = 256
KQUANT_BLOCKS = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
"""Bytes of a block."""


def kquant_codes(blocks: Tensor, kind: str) -> CodedWeight:
    """blocks: uint8 [.., N, K/256, bytes]; kind as in `KQUANT_BLOCKS`.

    A scale's bits are its byte and, 16 bits up, those of the block's half; so are a minimum's.

    The weights that are computed with are bf16(d * scale * q - dmin * min), or bf16(d * scale * (q - 32)) of
    q6_k: nothing is rounded before the difference, which is rounded to fp32.

    Raises: ShapeError for a half that is not finite.
    """
    if kind == "q6_k":
        low, high, scales = blocks[..., :128], blocks[..., 128:192], blocks[..., 192:208]
        # Two halves of 128 weights: their low four bits in nibbles 64 apart, their upper two bits 32 apart.
        low = torch.stack([low.unflatten(-1, (2, 64)) >> shift & 15 for shift in (0, 4)], -2).flatten(-3)
        high = torch.stack([high.unflatten(-1, (2, 32)) >> s & 3 for s in (0, 2, 4, 6)], -2).flatten(-3)
        codes = low | high << 4
        return CodedWeight(packing(kind), codes.flatten(-2), _bits(scales, blocks[..., 208:210]))
    scales, minima = _six_bits(blocks[..., 4:16])
    quants = blocks[..., -128:].unflatten(-1, (4, 32))
    codes = torch.stack([quants & 15, quants >> 4], -2).flatten(-3)
    if kind == "q5_k":
        codes |= torch.stack([(blocks[..., 16:48] >> bit & 1) << 4 for bit in range(8)], -2).flatten(-2)
    return CodedWeight(
        packing(kind),
        codes.flatten(-2),
        _bits(scales, blocks[..., 0:2]),
        _bits(minima, blocks[..., 2:4]),
    )


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> the 8 scales and 8 minima of six bits each that they hold."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return scales, minima


def _bits(scales: Tensor, half: Tensor) -> Tensor:
    """uint8 [.., blocks, groups] and the two bytes of a half [.., blocks, 2] -> int32 [.., all groups]."""
    return (half_bits(half)[..., None] << 16 | scales.to(torch.int32)).flatten(-2)


def half_bits(pairs: Tensor) -> Tensor:
    """Two bytes each [.., 2] -> the bits of a half, int32 [..]. Raises ShapeError unless finite."""
    halves = pairs.contiguous().view(torch.float16).squeeze(-1)
    if not bool(halves.isfinite().all()):
        raise ShapeError("a scale is not finite; the file is damaged")
    return halves.view(torch.int16).to(torch.int32) & 0xFFFF
