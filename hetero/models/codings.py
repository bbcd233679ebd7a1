"""How quantised checkpoints name and store their codes: which tensors make one weight, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hetero.errors import ModelError
from hetero.experts.imported import fp8_codes, mxfp4_codes
from hetero.kernels.cpu import CodedWeight


@dataclass(frozen=True, slots=True, eq=False)
class CodedStack:
    """The weights [N, K] of E experts in one tensor, each made when it is asked for.

    Attributes:
        count: E.
        read: the weight of one expert.
        nbytes: bytes of all of them in the file.
    """

    count: int
    read: Callable[[int], CodedWeight]
    nbytes: int

    def dequantize(self) -> Tensor:
        """[E, N, K] in bf16."""
        return torch.stack([self.read(e).dequantize() for e in range(self.count)])


Weight = Tensor | CodedWeight | CodedStack


class Coding(Protocol):
    """The convention of one kind of quantised checkpoint.

    Attributes:
        experts: the format that its experts have here.
    """

    @property
    def experts(self) -> str: ...

    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Names of the weights that tensors called `names` make, with the tensors of each."""
        ...

    def read(self, tensors: Sequence[Tensor]) -> Weight:
        """The weight that these tensors make. Raises ShapeError."""
        ...


@dataclass(frozen=True)
class Fp8:
    """`x.weight` in e4m3 beside `x.weight_scale_inv`, one scale for a block of weights.

    Scales of activations are left out: activations stay in bf16 here.
    """

    block: tuple[int, int] | None
    experts: str = "fp8"

    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        made: dict[str, tuple[str, ...]] = {}
        for name in names:
            if not name.endswith(("_scale_inv", ".activation_scale", ".input_scale")):
                scale = f"{name}_scale_inv"
                made[name] = (name, scale) if scale in names else (name,)
        return made

    def read(self, tensors: Sequence[Tensor]) -> Weight:
        if len(tensors) == 1:
            return tensors[0]
        codes, scales = tensors
        if codes.ndim == 3:
            return CodedStack(
                len(codes), lambda e: fp8_codes(codes[e], scales[e], self.block), codes.nbytes + scales.nbytes
            )
        return fp8_codes(codes, scales, self.block)


@dataclass(frozen=True)
class Mxfp4:
    """`x_blocks` [E, N, K/32, 16] with two codes in a byte, and `x_scales` [E, N, K/32], as gpt-oss ships."""

    experts: str = "mxfp4"

    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        made: dict[str, tuple[str, ...]] = {}
        for name in names:
            stem = name.removesuffix("_blocks")
            if stem != name and f"{stem}_scales" in names:
                made[stem] = (name, f"{stem}_scales")
            elif not (name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in names):
                made[name] = (name,)
        return made

    def read(self, tensors: Sequence[Tensor]) -> Weight:
        if len(tensors) == 1:
            return tensors[0]
        blocks, scales = tensors
        return CodedStack(
            len(blocks), lambda e: mxfp4_codes(blocks[e], scales[e]), blocks.nbytes + scales.nbytes
        )


class Plain:
    """Every tensor is a weight."""

    experts = "bf16"

    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        return {name: (name,) for name in names}

    def read(self, tensors: Sequence[Tensor]) -> Weight:
        return tensors[0]


def coding_of(quantization: Mapping[str, Any] | None) -> Coding:
    """The convention that a `quantization_config` describes. Raises ModelError for one that is not known."""
    if quantization is None:
        return Plain()
    method = str(quantization.get("quant_method"))
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        block = quantization.get("weight_block_size")
        return Fp8(None if block is None else (int(block[0]), int(block[1])))
    raise ModelError(
        f"the checkpoint is quantized with {method!r}; hetero reads plain weights, fp8 (e4m3), mxfp4 and "
        "GGUF. Dequantize it with Transformers first (dequantize=True in its quantization config) and save it"
    )
