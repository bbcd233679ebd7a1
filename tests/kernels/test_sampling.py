from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hetero.errors import ShapeError
from hetero.kernels import cpu, ops, reference


def rows(logits: torch.Tensor, first: int = 0, **options: float) -> dict[str, Any]:
    """Arguments of `sample` with the same options for all rows and keys (1, 2, 3, first + row)."""
    num = logits.shape[0]
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **options}
    keys = torch.tensor([[1, 2, 3, first + i] for i in range(num)], dtype=torch.int64)
    return {"logits": logits, "keys": keys, **{k: torch.full((num,), v) for k, v in values.items()}}


def random_logits(num: int, vocab: int, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * scale


OPTIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100_000},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1e-6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 16, 511, 513, 5000])
def test_sample_equals_the_reference(ctx: cpu.Context, options: dict[str, float], vocab: int) -> None:
    arguments = rows(random_logits(40, vocab), **options)
    ids, logp, raw = ops.sample(**arguments)
    want_ids, want_logp, want_raw = reference.sample(**arguments)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(logp, want_logp, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(raw, want_raw, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", OPTIONS[3:-1], ids=str)
def test_only_allowed_tokens_and_all_of_them_are_sampled(
    ctx: cpu.Context, options: dict[str, float], seed: int
) -> None:
    """Rounded logits, so that many tokens tie at the border of the set."""
    logits = (random_logits(1, 24, seed=seed) * 2).round() / 2
    arguments = rows(logits.expand(4000, -1).contiguous(), **options)
    ids, _, _ = ops.sample(**arguments)
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **options}
    keep = reference.allowed(logits[0], top_k=int(values.pop("top_k")), **values)
    p = torch.softmax(logits[0].double() / max(values["temperature"], 1e-9), -1).masked_fill(~keep, 0.0)
    seen = torch.bincount(ids, minlength=24) > 0
    assert not (seen & ~keep).any()
    assert seen[p / p.sum() > 0.005].all()


def test_frequencies_match_the_distribution(ctx: cpu.Context) -> None:
    """Chi-square over 50000 keys: consecutive positions, samples and tasks."""
    logits = random_logits(1, 30, scale=1.0)
    p = torch.softmax(logits[0].double(), -1)
    num = 50_000
    arguments = rows(logits.expand(num, -1).contiguous())
    index = torch.arange(num)
    for keys in (
        torch.stack([torch.zeros_like(index), index * 0, index * 0, index], 1),
        torch.stack([torch.full_like(index, 7), index // 100, index % 100, index * 0 + 5], 1),
        torch.stack([index, index * 0, index * 0, index * 0], 1),
    ):
        ids, _, _ = ops.sample(**{**arguments, "keys": keys})
        counts = torch.bincount(ids, minlength=30).double()
        chi2 = float(((counts - num * p).square() / (num * p)).sum())
        assert chi2 < 29 + 5 * math.sqrt(2 * 29)


def test_uniform_numbers_of_philox() -> None:
    """Known answers of Random123, then: every word of a key matters, and numbers lie inside (0, 1)."""
    assert reference.philox((0, 0), 0)[0] & 0xFFFFFFFF == 0x6627E8D5
    ones = (1 << 64) - 1
    assert reference.philox((ones, ones), ones)[0] & 0xFFFFFFFF == 0x408F276D
    base = [5, 6, 7, 8]
    numbers = {reference.uniform(*base)}
    for word in range(4):
        for bit in (0, 31, 32, 63):
            key = list(base)
            key[word] ^= 1 << bit
            numbers.add(reference.uniform(*key))
    assert len(numbers) == 17
    assert all(0.0 < u < 1.0 for u in numbers)


def test_greedy_takes_the_lower_id_of_a_tie(ctx: cpu.Context) -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [7, 900]] = 2.0
    logits[1, 999] = 1.0
    ids, logp, raw = ops.sample(**rows(logits, temperature=0.0))
    assert ids.tolist() == [7, 999, 0]
    assert (logp == 0.0).all()
    torch.testing.assert_close(raw, torch.log_softmax(logits, -1)[torch.arange(3), ids])


def test_bad_rows_are_reported_and_harm_no_other(ctx: cpu.Context) -> None:
    logits = random_logits(6, 700)
    want, _, _ = ops.sample(**rows(logits))
    bad = logits.clone()
    bad[1, 3], bad[2, 699], bad[3] = math.nan, math.inf, -math.inf
    bad[4, 5:] = -math.inf
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.9}):
        ids, logp, _ = ops.sample(**rows(bad, **options))
        assert ids[1:4].tolist() == [-1, -1, -1]
        assert torch.isnan(logp[1:4]).all()
        assert int(ids[4]) < 5
        assert torch.isfinite(logp[[0, 4, 5]]).all()
    ids, _, _ = ops.sample(**rows(bad))
    assert torch.equal(ids[[0, 5]], want[[0, 5]])


def test_a_row_is_sampled_alone(ctx: cpu.Context) -> None:
    logits = random_logits(50, 3001)
    arguments = rows(logits, top_p=0.9, temperature=1.3)
    whole = ops.sample(**arguments)
    for r in (0, 1, 49):
        alone = ops.sample(**{k: v[r : r + 1] for k, v in arguments.items()})
        assert all(torch.equal(a[0], w[r]) for a, w in zip(alone, whole, strict=True))
    for threads in (1, 3):
        with cpu.using(cpu.Context(threads, ctx.isa)):
            again = ops.sample(**arguments)
        assert all(torch.equal(a, w) for a, w in zip(again, whole, strict=True))


def test_mistakes_are_named() -> None:
    good = rows(torch.zeros(2, 5))
    for change, message in [
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, "float64 on cpu; expected"),
        ({"logits": torch.zeros(5)}, r"expected \[B, V\]"),
        ({"keys": good["keys"][:1]}, r"keys is \[1, 4\]"),
        ({"top_p": torch.tensor([0.5, 1.5])}, "top_p is"),
        ({"temperature": torch.tensor([-1.0, 1.0])}, "temperature is"),
        ({"min_p": torch.tensor([math.nan, 1.0])}, "min_p is"),
    ]:
        with pytest.raises(ShapeError, match=message):
            ops.sample(**{**good, **change})
