"""The kernels' operations in plain PyTorch, differentiable by autograd: the oracle of every test."""

from hetero.kernels.reference.attention import attention, paged_attention, read_kv, write_kv
from hetero.kernels.reference.experts import experts
from hetero.kernels.reference.linear import linear
from hetero.kernels.reference.rows import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    activation,
    gated_activation,
    rms_norm,
    softmax,
    topk,
)
from hetero.kernels.reference.sampling import allowed, philox, sample, token_logprobs, uniform

__all__ = [
    "ACTIVATIONS",
    "GATED_ACTIVATIONS",
    "activation",
    "allowed",
    "attention",
    "experts",
    "gated_activation",
    "linear",
    "paged_attention",
    "philox",
    "read_kv",
    "rms_norm",
    "sample",
    "softmax",
    "token_logprobs",
    "topk",
    "uniform",
    "write_kv",
]
