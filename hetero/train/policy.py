"""Log-probabilities of a micro-batch under the model: the one forward that training and scoring share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.models.forward import ForwardBatch, forward_hidden
from hetero.models.head import head
from hetero.train.batch import MicroBatch


def token_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability (differentiable) and entropy (not) of the N trained tokens: fp32 [N], [N], on the
    model's device.

    The head runs once per distinct (row, target) pair; tokens of a group that share both share the result.
    """
    device = model.device
    hidden = forward_hidden(model, _to(batch.forward, device))
    rows = _GatherRows.apply(hidden, batch.head_rows.to(device))
    logprobs, entropy = head(model).logprobs(rows, batch.head_targets.to(device), temperature)
    pairs = batch.pairs.to(device)
    return logprobs.index_select(0, pairs), entropy.index_select(0, pairs)


class _GatherRows(torch.autograd.Function):
    """hidden [T, H], rows [U] -> hidden[rows] [U, H], with gradients summed in fp32.

    A group's first tokens share the last row of the prompt, and their advantages sum to zero: the sum
    cancels, so its terms must not be rounded to bf16 one by one.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = hidden.shape
        return hidden.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, rows, grad.float()).to(grad.dtype), None


def _to(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Tokens on the device; segments stay on the CPU, where attention reads their lengths without waiting."""
    return replace(batch, token_ids=batch.token_ids.to(device), positions=batch.positions.to(device))
