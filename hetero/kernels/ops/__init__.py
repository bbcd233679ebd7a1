"""Differentiable operations over the CPU kernels."""

from hetero.kernels.batch import AttentionBatch, KVLayer
from hetero.kernels.cpu.runs import Runs
from hetero.kernels.ops.attention import attention, paged_attention
from hetero.kernels.ops.expert_lora import FACTORS, ExpertLoraFactors
from hetero.kernels.ops.experts import experts
from hetero.kernels.ops.linear import linear
from hetero.kernels.ops.logprobs import head_logits, token_logprobs
from hetero.kernels.ops.lora import LoraFactors
from hetero.kernels.ops.rows import activation, gated_activation, rms_norm, softmax, topk
from hetero.kernels.ops.sampling import sample

__all__ = [
    "FACTORS",
    "AttentionBatch",
    "ExpertLoraFactors",
    "KVLayer",
    "LoraFactors",
    "Runs",
    "activation",
    "attention",
    "experts",
    "gated_activation",
    "head_logits",
    "linear",
    "paged_attention",
    "rms_norm",
    "sample",
    "softmax",
    "token_logprobs",
    "topk",
]
