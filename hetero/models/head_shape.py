"""What a model does to the output of its LM head (scale, soft cap), learned by feeding it known logits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hetero.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class HeadShape:
    """logits = softcap * tanh(scale * raw / softcap)."""

    logit_scale: float = 1.0
    softcap: float | None = None


def head_shape(model: PreTrainedModel) -> HeadShape:
    """Found once per model and remembered. Raises ModelError when the formula is none of ours."""
    cached: HeadShape | None = model.__dict__.get("_hetero_head_shape")
    if cached is None:
        raw, got = _watch(model)
        cached = _fit(model, raw, got)
        model.__dict__["_hetero_head_shape"] = cached
    return cached


@torch.no_grad()
def _watch(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """(what the head returned, what the model returned for it), with a ramp in the place of real logits."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM or hetero.load_model()"
        )
    seen: list[tuple[Tensor, Tensor]] = []
    hidden: list[Tensor] = []

    def ramp(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        values = torch.linspace(-60.0, 60.0, output.shape[-1], device=output.device, dtype=torch.float32)
        fake = values.expand(output.shape).to(output.dtype)
        seen.append((args[0], fake))
        return fake

    def note(module: Any, args: Any, output: Any) -> None:
        hidden.append(output.last_hidden_state)

    handles = [head.register_forward_hook(ramp), model.get_decoder().register_forward_hook(note)]
    try:
        result = model(input_ids=torch.tensor([[0]], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    given, fake = seen[-1]
    if not bool(torch.isfinite(hidden[-1]).all()):
        raise ModelError(
            f"{type(model).__name__} computes NaN or infinite hidden states for a single token: the "
            "checkpoint holds such weights, or its data type has too small a range. Fetch it anew, or try it "
            "in Transformers."
        )
    if not torch.equal(given.reshape(-1), hidden[-1].reshape(-1)):
        raise ModelError(
            f"{type(model).__name__} changes the hidden states before its head; hetero does not know how"
        )
    return fake.reshape(-1).float(), result.logits.reshape(-1).float()


def _fit(model: PreTrainedModel, raw: Tensor, got: Tensor) -> HeadShape:
    config = model.config.get_text_config(decoder=True)
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value:
            scales += [float(value), 1.0 / float(value)]
    cap = getattr(config, "final_logit_softcapping", None)
    for scale, softcap in itertools.product(scales, (None, cap) if cap else (None,)):
        want = raw * scale
        if softcap is not None:
            want = torch.tanh(want / softcap) * softcap
        if torch.allclose(got, want, rtol=2e-2, atol=1e-2):
            return HeadShape(scale, None if softcap is None else float(softcap))
    raise ModelError(
        f"{type(model).__name__} changes its logits after the head in a way hetero does not know; known are "
        "a factor "
        "(logit_scale, logits_scaling, lm_head_multiplier) and final_logit_softcapping"
    )
