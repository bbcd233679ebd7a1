"""Weights that a checkpoint holds in codes already: taken as they are, without a second rounding.

fp8 with a scale for a block of weights (DeepSeek-V3 and the FP8 releases of Qwen and GLM), mxfp4 as gpt-oss
ships it, and the blocks of GGUF files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.errors import ShapeError
from hetero.experts.kquants import KQUANT_BLOCKS, half_bits, kquant_codes
from hetero.formats import packing
from hetero.kernels.cpu import PANEL, CodedWeight, PackedWeight

GGUF_BLOCKS = {"q8_0": 34, "q4_0": 18, "q4_1": 20} | KQUANT_BLOCKS
"""Bytes of a block of 32 weights (of 256 in K-quants) in the GGUF types that keep their codes and scales."""

FP8_BLOCK = 128
"""Values of K that share a scale in the format fp8."""


def fp8_codes(
    weight: Tensor, scale_inv: Tensor, block: tuple[int, int] | None = (FP8_BLOCK, FP8_BLOCK)
) -> CodedWeight:
    """e4m3 codes [N, K] or [E, N, K] and the scales of their blocks, [.., N/block, K/block].

    The weights that are computed with are bf16(code * scale).

    Args:
        block: rows and columns of a block, a multiple of 32 and of 128; the last of a row or column may be
            smaller. None: one scale for the whole matrix.

    Raises: ShapeError, also for codes or scales that are NaN.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise ShapeError(f"weight is {weight.dtype}; expected torch.float8_e4m3fn")
    codes = weight.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ShapeError("weight holds NaN; repair the checkpoint")
    n, k = weight.shape[-2:]
    rows, columns = block or (-(-n // PANEL) * PANEL, -(-k // FP8_BLOCK) * FP8_BLOCK)
    if rows % PANEL or columns % FP8_BLOCK:
        raise ShapeError(
            f"scales stand for blocks of {rows} by {columns} weights; the format fp8 holds multiples of "
            f"{PANEL} by {FP8_BLOCK}. Ask for another format, such as bf16 or int8, where these are decoded"
        )
    scales = scale_inv.to("cpu", torch.float32)
    if block is None:
        scales = scales.reshape(*weight.shape[:-2], 1, 1)
    want = (*weight.shape[:-2], -(-n // rows), -(-k // columns))
    if tuple(scales.shape) != want:
        raise ShapeError(f"scales are {list(scales.shape)}; expected {list(want)}: rows of blocks, blocks")
    if not bool(scales.isfinite().all()):
        raise ShapeError("a scale is not finite; repair the checkpoint")
    scales = scales.repeat_interleave(columns // FP8_BLOCK, -1)[..., : -(-k // FP8_BLOCK)]
    return CodedWeight(packing("fp8"), codes, scales.contiguous().view(torch.int32), scale_rows=rows)


def mxfp4_codes(blocks: Tensor, scales: Tensor) -> CodedWeight:
    """blocks [.., N, K/32, 16] uint8, two codes each, the first in the low half; scales [.., N, K/32] uint8.

    Raises: ShapeError, also for scales that are NaN.
    """
    if blocks.dtype != torch.uint8 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ShapeError(
            f"blocks are {blocks.dtype} {list(blocks.shape)} and scales {list(scales.shape)}; "
            "expected uint8 [.., N, K/32, 16] and [.., N, K/32]"
        )
    if bool((scales == 255).any()):
        raise ShapeError("scales hold NaN; repair the checkpoint")
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3)
    return CodedWeight(packing("mxfp4"), codes, scales.to(torch.int32))


def gguf_codes(raw: Tensor, kind: str) -> CodedWeight:
    """Blocks of a GGUF tensor, uint8 [N, bytes per row] or [E, N, bytes per row]; kind as in `GGUF_BLOCKS`.

    The weights that are computed with are bf16(d * q) or bf16(d * q + m); K-quants see `kquant_codes`.

    Raises: ShapeError for another kind, a row that is no whole number of blocks, or a scale that is not
        finite.
    """
    size = GGUF_BLOCKS.get(kind)
    if size is None:
        raise ShapeError(f"GGUF type {kind!r} does not keep its codes here; known: {', '.join(GGUF_BLOCKS)}")
    if raw.dtype != torch.uint8 or raw.shape[-1] % size:
        raise ShapeError(
            f"{kind} rows are {raw.dtype} of {raw.shape[-1]} bytes; expected uint8 in blocks of {size}"
        )
    blocks = raw.unflatten(-1, (-1, size))
    if kind in KQUANT_BLOCKS:
        return kquant_codes(blocks, kind)
    scales = half_bits(blocks[..., 0:2])
    minima = half_bits(blocks[..., 2:4]) if kind == "q4_1" else None
    quants = blocks[..., size - (32 if kind == "q8_0" else 16) :]
    if kind != "q8_0":  # the first sixteen weights in the low halves
        quants = torch.cat([quants & 15, quants >> 4], dim=-1)
    return CodedWeight(packing(kind), quants.flatten(-2), scales, minima)


def import_fp8(weight: Tensor, scale_inv: Tensor, *, parts: int = 1) -> PackedWeight:
    """Pack what `fp8_codes` takes. parts: runs of N that are padded each on its own; each must begin a block.

    Raises: ShapeError.
    """
    if parts > 1 and weight.shape[-2] // parts % FP8_BLOCK:
        raise ShapeError(
            f"{parts} parts of {weight.shape[-2] // parts} rows share scale blocks of {FP8_BLOCK} rows"
        )
    return fp8_codes(weight, scale_inv).pack(parts)


def import_mxfp4(blocks: Tensor, scales: Tensor, *, parts: int = 1) -> PackedWeight:
    """Pack what `mxfp4_codes` takes. Raises ShapeError."""
    return mxfp4_codes(blocks, scales).pack(parts)


def import_gguf(raw: Tensor, kind: str, *, parts: int = 1) -> PackedWeight:
    """Pack what `gguf_codes` takes. Raises ShapeError."""
    return gguf_codes(raw, kind).pack(parts)
