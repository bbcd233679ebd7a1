"""The LM head: hidden states to logits and log-probabilities, with what some families do after the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetero.errors import ModelError
from hetero.kernels import ops
from hetero.kernels.cpu import PackedWeight
from hetero.models.head_shape import head_shape
from hetero.models.linear import HeteroLinear
from hetero.models.lora_linear import LoraLinear, lora_linear
from hetero.models.torch_rows import token_logprobs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LmHead:
    """logits = softcap(scale * (hidden W^T + b)), as the model's own forward computes them.

    Attributes:
        weight: [V, H], packed (CPU) or a plain tensor (dense parts on a GPU).
        bias: [V] or None.
        logit_scale: factor on the logits (Cohere multiplies, Granite divides).
        softcap: c in c * tanh(logits / c), or None (Gemma).
        lora: adapter of the head, or None.
    """

    weight: PackedWeight | Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    lora: ops.LoraFactors | ops.Runs[ops.LoraFactors] | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] -> fp32 [B, V]; without gradient where the weight is packed."""
        if isinstance(self.weight, PackedWeight):
            return ops.head_logits(hidden, self.weight, self.bias, self.logit_scale, self.softcap, self.lora)
        out = lora_linear(hidden, self.weight, self.bias, self.lora).float()
        if self.logit_scale != 1.0:
            out = out * self.logit_scale
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, H], targets [T] int64 -> (log-probabilities [T] fp32, differentiable; entropy [T] fp32,
        no grad)."""
        if isinstance(self.lora, ops.Runs):
            raise ModelError("log-probabilities are computed under one adapter version at a time")
        if isinstance(self.weight, PackedWeight):
            return ops.token_logprobs(
                hidden,
                self.weight,
                targets,
                temperature,
                bias=self.bias,
                logit_scale=self.logit_scale,
                softcap=self.softcap,
                lora=self.lora,
            )
        return token_logprobs(hidden, self.logits, targets, temperature)


def head(model: PreTrainedModel) -> LmHead:
    """The head of `model`, sharing its weight. Raises ModelError when there is none or it computes an
    unknown formula."""
    shape = head_shape(model)
    module = model.get_output_embeddings()
    if isinstance(module, HeteroLinear) and module.packed is not None:
        return LmHead(module.packed, module.bias, shape.logit_scale, shape.softcap, module.lora)
    if isinstance(module, torch.nn.Linear):
        lora = module.lora if isinstance(module, LoraLinear) else None
        return LmHead(module.weight, module.bias, shape.logit_scale, shape.softcap, lora)
    raise ModelError(
        f"the head of {type(model).__name__} is a {type(module).__name__}; hetero needs a linear layer"
    )
