"""Packing: log-probabilities and gradients are those of samples alone, in fp64 on a small transformer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from hetero.errors import CapacityError, DataError
from hetero.kernels import reference
from hetero.kernels.batch import AttentionBatch
from hetero.train.batch import MicroBatch, TrainSample, pack

VOCAB, HEADS, DIM = 11, 2, 8


class Transformer(nn.Module):
    """Two layers of causal attention with learned positions, on the packed layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, HEADS * DIM)
        self.positions = nn.Embedding(64, HEADS * DIM)
        self.layers = nn.ModuleList(nn.Linear(HEADS * DIM, 3 * HEADS * DIM) for _ in range(2))
        self.head = nn.Linear(HEADS * DIM, VOCAB)
        self.double()

    def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        x = self.tokens(token_ids) + self.positions(positions)
        for layer in self.layers:
            q, k, v = layer(x).view(len(x), 3, HEADS, DIM).unbind(1)
            x = x + reference.attention(q, k, v, batch, DIM**-0.5).flatten(1).tanh()
        return self.head(x).log_softmax(-1)

    def packed(self, batch: MicroBatch) -> Tensor:
        forward = batch.forward
        logp = self(forward.token_ids, forward.positions, forward.attention)
        return logp[batch.head_rows, batch.head_targets][batch.pairs]

    def alone(self, sample: TrainSample) -> Tensor:
        """Log-probabilities of all completion tokens, from one unpacked sequence."""
        tokens = torch.tensor([*sample.prompt_ids, *sample.completion_ids])
        positions = torch.arange(len(tokens))
        logp = self(tokens, positions, AttentionBatch.packed([len(tokens)]))
        start = len(sample.prompt_ids)
        return logp[positions[start - 1 : -1], tokens[start:]]


def make_samples(seed: int = 0, num_groups: int = 4, size: int = 4) -> list[TrainSample]:
    """Groups whose completions share beginnings; some tokens masked, one sample wholly; order shuffled."""
    rng = random.Random(seed)
    samples = []
    for group in range(num_groups):
        prompt = [1, 2, 3, *rng.choices(range(VOCAB), k=rng.randint(0, 6))]
        for _ in range(size):
            completion = rng.choices((4, 5), k=rng.randint(1, 7))
            mask = [rng.random() < 0.8 for _ in completion] if rng.random() < 0.5 else None
            samples.append(TrainSample(prompt, completion, advantage=rng.gauss(0, 1), mask=mask, group=group))
    samples[5] = TrainSample(samples[5].prompt_ids, [4, 5, 4], mask=[False] * 3, group=samples[5].group)
    rng.shuffle(samples)
    return samples


def scattered(batches: Iterable[MicroBatch], model: Transformer) -> dict[tuple[int, int], Tensor]:
    """(sample, completion token) -> log-probability."""
    found: dict[tuple[int, int], Tensor] = {}
    for batch in batches:
        for sample, offset, logp in zip(
            batch.samples.tolist(), batch.offsets.tolist(), model.packed(batch), strict=True
        ):
            assert (sample, offset) not in found
            found[sample, offset] = logp
    return found


@pytest.mark.parametrize("max_rows", [1, 9, 25, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_packed_equals_alone_with_gradients(seed: int, max_rows: int) -> None:
    model, samples = Transformer(), make_samples(seed)
    found = scattered(pack(samples, max_rows), model)
    expected = {
        (i, j): (logp, sample.advantage)
        for i, sample in enumerate(samples)
        for j, logp in enumerate(model.alone(sample))
        if sample.trained[j]
    }
    assert found.keys() == expected.keys()
    for key, (logp, _) in expected.items():
        torch.testing.assert_close(found[key], logp, rtol=1e-12, atol=1e-12)
    packed_loss = sum(float(expected[key][1]) * logp.exp() for key, logp in found.items())
    alone_loss = sum(float(advantage) * logp.exp() for logp, advantage in expected.values())
    parameters = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(packed_loss, parameters), torch.autograd.grad(alone_loss, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_rows_are_shared_and_the_last_token_needs_none() -> None:
    prompt = list(range(10))
    samples = [TrainSample(prompt, completion) for completion in ([4], [5], [4, 4], [4, 4, 6], [4, 4])]
    (batch,) = pack(samples, 100)
    assert batch.num_rows == batch.forward.num_tokens == 10 + 2
    assert batch.num_tokens == 5 * 10 + 9
    pairs = {(9, 4), (9, 5), (10, 4), (11, 6)}
    assert set(zip(batch.head_rows.tolist(), batch.head_targets.tolist(), strict=True)) == pairs
    assert batch.samples.tolist() == [0, 1, 2, 2, 3, 3, 3, 4, 4]
    assert batch.offsets.tolist() == [0, 0, 0, 1, 0, 1, 2, 0, 1]


def test_rows_after_the_last_trained_token_are_not_computed() -> None:
    sample = TrainSample([1, 2], [4, 5, 4, 5], mask=[True, True, False, False])
    (batch,) = pack([sample], 100)
    assert batch.num_rows == 3
    (scoring,) = pack([sample], 100, every_token=True)
    assert scoring.num_rows == 5
    assert scoring.offsets.tolist() == [0, 1, 2, 3]


def test_micro_batches_respect_the_limit_and_keep_groups_together() -> None:
    samples = make_samples(7, num_groups=8)
    batches = pack(samples, 30)
    assert len(batches) > 2
    assert all(batch.num_rows <= 30 for batch in batches)
    groups = [samples[i].group for batch in batches for i in dict.fromkeys(batch.samples.tolist())]
    assert len([group for group, _ in itertools.groupby(groups)]) == len(set(groups))
    again = pack(samples, 30)
    for first, second in zip(batches, again, strict=True):
        assert torch.equal(first.forward.token_ids, second.forward.token_ids)
        assert torch.equal(first.samples, second.samples)


def test_a_sample_longer_than_the_limit_is_alone() -> None:
    samples = [TrainSample([1], [2]), TrainSample([3] * 20, [4] * 20), TrainSample([1], [5])]
    batches = pack(samples, 10)
    assert [batch.num_rows for batch in batches] == [1, 39, 1]


def test_longer_than_the_context_is_an_error_that_says_which() -> None:
    samples = [TrainSample([1], [2]), TrainSample([3] * 6, [4] * 5)]
    assert len(pack(samples, 100, context=11)) == 1
    with pytest.raises(CapacityError, match=r"sample 1 has 6 prompt and 5 completion tokens.*10\b"):
        pack(samples, 100, context=10)


def test_fully_masked_and_empty_samples_change_nothing() -> None:
    base = [TrainSample([1, 2], [3, 4], group=1), TrainSample([1, 2], [5], group=1)]
    extra = [
        *base,
        TrainSample([1, 2, 3], [4, 5], mask=[False, False], group=1),
        TrainSample([9], [], group=2),
    ]
    (first,), (second,) = pack(base, 50), pack(extra, 50)
    assert torch.equal(first.forward.token_ids, second.forward.token_ids)
    assert torch.equal(first.pairs, second.pairs)
    assert pack(extra[2:], 50) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompt_ids": []}, "BOS"),
        ({"logprobs": [0.0]}, "logprobs has 1 values for 2"),
        ({"mask": [True]}, "mask has 1 values for 2"),
        ({"advantage": [1.0, 2.0, 3.0]}, "advantage has 3 values for 2"),
        ({"advantage": float("nan")}, "mask the sample"),
    ],
)
def test_bad_samples_are_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TrainSample(**({"prompt_ids": [1], "completion_ids": [2, 3]} | kwargs))  # type: ignore[arg-type]


def test_flat_means_no_advantage_where_trained() -> None:
    assert TrainSample([1], [2, 3], advantage=0.0).is_flat
    assert not TrainSample([1], [2, 3], advantage=0.5).is_flat
    assert TrainSample([1], [2, 3], advantage=[0.0, 2.0], mask=[True, False]).is_flat
    assert not TrainSample([1], [2, 3], advantage=[0.0, 2.0]).is_flat
