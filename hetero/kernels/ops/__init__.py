"""Differentiable operations over the CPU kernels."""

from hetero.kernels.ops.linear import linear
from hetero.kernels.ops.lora import LoraFactors
from hetero.kernels.ops.rows import activation, gated_activation, rms_norm, softmax, topk

__all__ = [
    "LoraFactors",
    "activation",
    "gated_activation",
    "linear",
    "rms_norm",
    "softmax",
    "topk",
]
