"""The LM head with what some families do after it, against the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import save_tiny

from hetero.errors import ModelError
from hetero.models import forward_hidden, head, load_model, scoring_batch
from hetero.models.head_shape import HeadShape, head_shape

Checkpoint = Callable[[str], Path]
IDS = [5, 9, 100, 23, 77]


@pytest.mark.parametrize("dense", ["bf16", "torch"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", HeadShape()),
        ("granite", HeadShape(logit_scale=0.125)),
        ("cohere2", HeadShape(logit_scale=0.25)),
        ("gemma2", HeadShape(softcap=7.0)),
    ],
)
def test_logits_and_logprobs_follow_the_models_own_formula(
    checkpoint: Checkpoint, name: str, shape: HeadShape, dense: str
) -> None:
    model = load_model(checkpoint(name), device="cpu", dense=dense)
    assert head_shape(model) == shape
    lm_head = head(model)
    targets = torch.tensor(IDS)
    with torch.no_grad():
        hidden = forward_hidden(model, scoring_batch([IDS]))
        got = lm_head.logits(hidden)
        want = model(torch.tensor([IDS])).logits[0].float()
        logp, entropy = lm_head.logprobs(hidden, targets, 0.7)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    reference = torch.log_softmax(got / 0.7, -1)
    torch.testing.assert_close(logp, reference.gather(1, targets[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1), rtol=1e-3, atol=1e-3)


def test_torch_head_has_gradients_and_accepts_no_rows(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu", dense="torch")
    hidden = torch.randn(600, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(600) % 128
    logp, entropy = head(model).logprobs(hidden, targets, 1.0)
    assert not entropy.requires_grad
    logp.sum().backward()
    twin = hidden.detach().float().requires_grad_()
    logits = twin @ model.lm_head.weight.float().T
    torch.log_softmax(logits, -1).gather(1, targets[:, None]).sum().backward()
    torch.testing.assert_close(hidden.grad.float(), twin.grad, rtol=0.02, atol=0.02)
    heat = torch.linspace(0.5, 2.0, 600)
    warm, _ = head(model).logprobs(hidden, targets, heat)
    want = torch.log_softmax(logits / heat[:, None], -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(warm, want, rtol=0.02, atol=0.02)
    empty, _ = head(model).logprobs(hidden[:0], targets[:0], 1.0)
    assert empty.shape == (0,)


def test_an_unknown_formula_is_refused(tmp_path: Path) -> None:
    model = load_model(save_tiny("llama", tmp_path), device="cpu", dense="torch")
    del model.__dict__["_hetero_head_shape"]
    forward = model.forward

    def shifted(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits + 3.0
        return output

    model.forward = shifted
    with pytest.raises(ModelError, match="changes its logits after the head"):
        head(model)
