"""Differentiable operations over the CPU kernels."""

from hetero.kernels.ops.rows import activation, gated_activation, rms_norm, softmax, topk

__all__ = ["activation", "gated_activation", "rms_norm", "softmax", "topk"]
