"""Bit for bit: training forward == whole prefill == chunked prefill == decode, alone or in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from paging import Pager
from torch import Tensor
from transformers import PreTrainedModel

from hetero.kernels import ops
from hetero.models import forward_hidden, head, load_model, scoring_batch

LENGTHS = (37, 70, 5, 33)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> PreTrainedModel:
    return load_model(checkpoint(request.param), device="cpu")


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Hidden states of each sequence scored by itself: the reference of every test here."""
    with torch.no_grad():
        return [forward_hidden(model, scoring_batch([ids])) for ids in sequences]


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got, want) and bool(got.isfinite().all())


def test_nothing_is_left_to_pytorch(model: PreTrainedModel) -> None:
    assert model.hetero.inexact == []


def test_packing_changes_no_bit(
    model: PreTrainedModel, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    with torch.no_grad():
        together = forward_hidden(model, scoring_batch(sequences)).split(LENGTHS)
        backwards = forward_hidden(model, scoring_batch(sequences[::-1])).split(LENGTHS[::-1])[::-1]
    for got, other, want in zip(together, backwards, alone, strict=True):
        assert same(got, want)
        assert same(other, want)


def test_gradients_change_no_bit_of_the_forward(
    model: PreTrainedModel, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    inputs = model.get_input_embeddings()
    hook = inputs.register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        hidden = forward_hidden(model, scoring_batch(sequences[:2]))
    finally:
        hook.remove()
    assert hidden.requires_grad
    for got, want in zip(hidden.detach().split(LENGTHS[:2]), alone, strict=False):
        assert same(got, want)


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
def test_prefill_in_chunks_and_decode_change_no_bit(
    model: PreTrainedModel, sequences: list[list[int]], alone: list[Tensor], chunk: int
) -> None:
    pager = Pager(model, len(sequences), 3, reverse=True)
    got: list[list[Tensor]] = [[] for _ in sequences]
    while True:
        done = pager.lengths
        work = [(i, ids[done[i] : done[i] + chunk]) for i, ids in enumerate(sequences) if done[i] < len(ids)]
        if not work:
            break
        for (i, _), hidden in zip(work, pager.step(work), strict=True):
            got[i].append(hidden)
    for pieces, want in zip(got, alone, strict=True):
        assert same(torch.cat(pieces), want)


def test_mixed_prefill_and_decode_change_no_bit(
    model: PreTrainedModel, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    pager = Pager(model, len(sequences), 3)
    first, second = sequences[0], sequences[1]
    a = pager.step([(0, first[:30])])
    b = pager.step([(1, second[:64]), (0, first[30:31])])
    c = pager.step([(0, first[31:]), (1, second[64:65])])
    d = pager.step([(1, second[65:])])
    assert same(torch.cat([a[0], b[1], c[0]]), alone[0])
    assert same(torch.cat([b[0], c[1], d[0]]), alone[1])


def test_logits_of_a_row_do_not_depend_on_the_batch(model: PreTrainedModel, alone: list[Tensor]) -> None:
    lm_head = head(model)
    with torch.no_grad():
        whole = lm_head.logits(torch.cat(alone))
        rows = torch.cat([lm_head.logits(row[None]) for row in alone[0]])
    assert whole.dtype == torch.float32
    assert same(whole[: LENGTHS[0]], rows)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_equal_trained_logprobs(
    model: PreTrainedModel, alone: list[Tensor], temperature: float
) -> None:
    lm_head = head(model)
    hidden = torch.cat(alone)
    logits = lm_head.logits(hidden)
    rows = hidden.shape[0]
    keys = torch.arange(4 * rows).view(rows, 4).to(torch.uint64)
    heat = torch.full((rows,), temperature)
    off = torch.zeros(rows)
    ids, logp, raw = ops.sample(logits, heat, off + 1.0, off.to(torch.int32), off, keys)
    trained, _ = lm_head.logprobs(hidden.clone().requires_grad_(), ids.to(torch.int64), temperature)
    assert same(trained.detach(), logp)
    assert same(logp, raw)
