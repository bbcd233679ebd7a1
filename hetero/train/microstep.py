"""What happens to one micro-batch: forward, loss, backward into the adapter's gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.models.lora import lora_disabled
from hetero.models.routing import watched_routing
from hetero.train.batch import MicroBatch
from hetero.train.columns import SampleColumns
from hetero.train.losses import LossConfig, LossInputs, compute_loss
from hetero.train.policy import token_logprobs
from hetero.train.routing import RoutingLog


def backward(
    model: PreTrainedModel,
    batch: MicroBatch,
    columns: SampleColumns,
    config: LossConfig,
    temperature: float,
    routing: RoutingLog,
) -> dict[str, Tensor]:
    """Add the gradient of sum(weights * token loss) to the masters; returns columns [N] for the log.

    Where the batch has routes, the experts are those; the reference selects its own.
    """
    taken = columns.take(batch, model.device)
    ref_logprobs = reference_logprobs(model, batch, temperature) if config.kl_coef else None
    recorded = None if batch.routes is None else batch.routes.to(model.device)
    with torch.enable_grad(), watched_routing(model, recorded, replay=True, measure=True) as sites:
        logprobs, entropy = token_logprobs(model, batch, temperature)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=taken["old_logprobs"],
            advantages=taken["advantages"],
            weights=taken["weights"],
            ref_logprobs=ref_logprobs,
            proximal_logprobs=taken["proximal_logprobs"],
            samples=batch.samples,
        )
        outputs = compute_loss(inputs, config)
        outputs.loss.backward()
        routing.add(sites)
    return (
        taken | outputs.tokens | {"logprobs": logprobs.detach(), "entropy": entropy, "samples": batch.samples}
    )


@torch.no_grad()
def measure(
    model: PreTrainedModel, batch: MicroBatch, columns: SampleColumns, temperature: float
) -> dict[str, Tensor]:
    """The columns that need no loss and no gradient."""
    logprobs, entropy = token_logprobs(model, batch, temperature)
    return columns.take(batch, model.device) | {
        "logprobs": logprobs,
        "entropy": entropy,
        "samples": batch.samples,
    }


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Tensor:
    """[N] under the base model: the adapter is off."""
    with lora_disabled(model):
        return token_logprobs(model, batch, temperature)[0]
