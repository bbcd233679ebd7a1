"""Ordinary Transformers use of a hetero model: padding, caches, packed positions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero.errors import ModelError
from hetero.models import forward_hidden, load_model, scoring_batch
from hetero.models.attention import hetero_torch_attention

Checkpoint = Callable[[str], Path]
SHORT, LONG = [11, 42, 7], [3, 99, 54, 20, 8, 61, 77, 12, 33]


def padded(left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """SHORT and LONG as a batch with its mask."""
    gap = [0] * (len(LONG) - len(SHORT))
    ids = [[*gap, *SHORT] if left else [*SHORT, *gap], LONG]
    mask = [[0] * len(gap) + [1] * len(SHORT), [1] * len(LONG)]
    return torch.tensor(ids), torch.tensor([mask[0] if left else mask[0][::-1], mask[1]])


@pytest.fixture(params=["mixtral_window", "gpt_oss", "deepseek_v3"])
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> PreTrainedModel:
    return load_model(checkpoint(request.param), device="cpu")


@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_reach_real_tokens(model: PreTrainedModel, left: bool) -> None:
    ids, mask = padded(left)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        for row, sequence in enumerate((SHORT, LONG)):
            alone = model(input_ids=torch.tensor([sequence])).logits[0]
            assert torch.equal(got[row][mask[row].bool()], alone)


def test_plain_forward_equals_packed_forward(model: PreTrainedModel) -> None:
    with torch.no_grad():
        plain = model.get_decoder()(input_ids=torch.tensor([LONG]), use_cache=False).last_hidden_state[0]
        assert torch.equal(plain, forward_hidden(model, scoring_batch([LONG])))


def test_generate_with_cache_and_left_padding_continues_each_prompt(model: PreTrainedModel) -> None:
    ids, mask = padded(left=True)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, sequence in enumerate((SHORT, LONG)):
        alone = model.generate(torch.tensor([sequence]), use_cache=False, **options)
        assert torch.equal(together[row], alone[0, len(sequence) :])


def test_greedy_generation_agrees_with_transformers(checkpoint: Checkpoint) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    ours = load_model(checkpoint("llama"), device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.tensor([LONG])
    assert torch.equal(ours.generate(prompt, **options), theirs.generate(prompt, **options))


def test_positions_that_restart_are_separate_sequences(model: PreTrainedModel) -> None:
    ids = torch.tensor([SHORT + LONG])
    positions = torch.tensor([[*range(len(SHORT)), *range(len(LONG))]])
    with torch.no_grad():
        got = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        want = [model(input_ids=torch.tensor([s])).logits[0] for s in (SHORT, LONG)]
    assert torch.equal(got, torch.cat(want))


def test_gradients_flow_through_ordinary_calls(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("qwen3_moe"), device="cpu")
    ids, mask = padded(left=True)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, attention_mask=mask).logits.float()[:, -1].square().sum().backward()
    assert embeds.grad is not None
    real = embeds.grad.abs().sum(-1) > 0
    assert torch.equal(real, mask.bool())


def test_four_dimensional_masks_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="padding mask"):
        model(input_ids=torch.tensor([LONG]), attention_mask=torch.ones(1, 1, len(LONG), len(LONG)))


class _Attention(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"is_causal": False}, "both directions"),
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
    ],
)
def test_attention_that_would_be_computed_wrongly_is_refused(
    options: dict[str, object], message: str
) -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelError, match=message):
        hetero_torch_attention(_Attention(), q, q, q, None, **options)


def test_a_model_that_drops_keyword_arguments_cannot_run_packed(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu")
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, hetero_batch=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ModelError, match="does not pass keyword arguments"):
        forward_hidden(model, scoring_batch([LONG]))
