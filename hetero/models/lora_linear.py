"""An ordinary `nn.Linear` that carries LoRA: dense layers on a GPU, or left to PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetero.kernels.cpu.runs import Runs

if TYPE_CHECKING:
    from hetero.kernels.ops import LoraFactors


class LoraLinear(nn.Linear):
    """y = x W^T + b + scale * B (A x), factors cast to the dtype of x as the CPU kernels cast them to bf16.

    Shares the parameters of the layer it replaces, under the same names.

    Attributes:
        lora: adapter of this layer, or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight = linear.weight
        self.bias = linear.bias
        self.lora: LoraFactors | Runs[LoraFactors] | None = None
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        return lora_linear(x, self.weight, self.bias, self.lora)


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, lora: LoraFactors | Runs[LoraFactors] | None
) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N] in the dtype of x, on any device."""
    y = functional.linear(x, weight, bias)
    if isinstance(lora, Runs):
        rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        lora.check(len(rows))
        for part, first, end in zip(lora.parts, (0, *lora.ends), lora.ends, strict=False):
            out[first:end] = _add_lora(out[first:end], rows[first:end], part)
        return y
    return _add_lora(y, x, lora)


def _add_lora(y: Tensor, x: Tensor, lora: LoraFactors | None) -> Tensor:
    if lora is None:
        return y
    inner = functional.linear(x, lora.a.to(x.dtype))
    return torch.add(y, functional.linear(inner, lora.b.to(x.dtype)), alpha=lora.scale)
