"""Metrics against their definitions, and their independence of how a batch is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hetero.train.metrics import TokenLog, loss_metrics, mismatch_metrics, mismatch_of, off_policy_of


def vectors(seed: int = 0, n: int = 500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, n).astype(np.float32)
    trained = (rollout + 0.01 * rng.standard_normal(n)).astype(np.float32)
    return rollout, trained, np.sort(rng.integers(0, 20, n))


def test_equal_logprobs_are_exactly_zero() -> None:
    rollout, _, samples = vectors()
    metrics = mismatch_metrics(rollout, rollout.copy(), samples)
    zero = {
        "logp_abs_max",
        "logp_abs_mean",
        "logp_abs_p99",
        "kl_k1",
        "kl_k3",
        "chi2_token",
        "chi2_seq",
        "nonfinite",
    }
    one = {"token_mult_prob_error", "ppl_ratio", "ess", "is_mean", "is_max", "is_min", "prob_pearson"}
    assert {name for name, value in metrics.items() if value == 0} == {f"mismatch/{name}" for name in zero}
    assert {name for name, value in metrics.items() if value == 1} >= {f"mismatch/{name}" for name in one}
    assert metrics["mismatch/bitwise_equal_frac"] == 1


def test_one_changed_bit_is_seen() -> None:
    rollout, _, samples = vectors()
    trained = rollout.copy()
    trained[3] = np.nextafter(trained[3], np.float32(0))
    metrics = mismatch_metrics(rollout, trained, samples)
    assert 0 < metrics["mismatch/logp_abs_max"] < 1e-5
    assert metrics["mismatch/bitwise_equal_frac"] == pytest.approx(1 - 1 / len(rollout))


def test_definitions() -> None:
    rollout, trained, samples = vectors()
    metrics = mismatch_metrics(rollout, trained, samples)
    delta = [float(t) - float(r) for t, r in zip(trained, rollout, strict=True)]
    ratio = [math.exp(d) for d in delta]
    products = [
        math.exp(sum(d for d, s in zip(delta, samples, strict=True) if s == k)) for k in set(samples.tolist())
    ]
    n = len(delta)
    expected = {
        "logp_abs_max": max(map(abs, delta)),
        "logp_abs_mean": sum(map(abs, delta)) / n,
        "kl_k1": -sum(delta) / n,
        "kl_k3": sum(r - 1 - d for r, d in zip(ratio, delta, strict=True)) / n,
        "token_mult_prob_error": sum(math.exp(abs(d)) for d in delta) / n,
        "ppl_ratio": math.exp(-sum(delta) / n),
        "chi2_token": sum(r * r for r in ratio) / n - 1,
        "chi2_seq": sum(p * p for p in products) / len(products) - 1,
        "ess": sum(ratio) ** 2 / (n * sum(r * r for r in ratio)),
        "is_max": max(ratio),
        "prob_pearson": float(
            np.corrcoef(np.exp(rollout.astype(float)), np.exp(trained.astype(float)))[0, 1]
        ),
    }
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_unknown_values_are_left_out_and_counted() -> None:
    rollout, trained, samples = vectors()
    reference = mismatch_metrics(rollout[2:], trained[2:], samples[2:])
    rollout[0], rollout[1] = math.nan, -math.inf
    metrics = mismatch_metrics(rollout, trained, samples)
    assert metrics == reference | {"mismatch/nonfinite": 2.0}
    empty = np.empty(0, np.float32)
    assert mismatch_metrics(empty, empty, np.empty(0, np.int64)) == {}
    assert mismatch_metrics(rollout[:2], trained[:2], samples[:2]) == {"mismatch/nonfinite": 2.0}


def columns(n: int = 60) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    names = ("loss", "weights", "entropy", "logprobs", "old_logprobs", "kl")
    values = {name: torch.randn(n, generator=g) for name in names}
    return values | {
        name: torch.rand(n, generator=g) < 0.3 for name in ("clip_low", "clip_high", "dual_clip")
    }


def test_loss_metrics_do_not_depend_on_the_cut() -> None:
    whole, parts = TokenLog(), TokenLog()
    values = columns()
    whole.add(values)
    for start, stop in ((0, 1), (1, 40), (40, 60)):
        parts.add({name: column[start:stop] for name, column in values.items()})
    assert loss_metrics(whole, 60.0) == loss_metrics(parts, 60.0)


def test_loss_metrics_are_token_means() -> None:
    log, values = TokenLog(), columns()
    log.add(values)
    metrics = loss_metrics(log, 12.5)
    wide = {name: column.double() for name, column in values.items()}
    delta = wide["logprobs"] - wide["old_logprobs"]
    expected = {
        "loss": float((wide["loss"] * wide["weights"]).sum() / 12.5),
        "entropy": float(wide["entropy"].mean()),
        "kl": float(wide["kl"].mean()),
        "approx_kl": float((delta.exp() - 1 - delta).mean()),
        "clip_ratio/low_mean": float(wide["clip_low"].mean()),
        "clip_ratio/high_mean": float(wide["clip_high"].mean()),
        "clip_ratio/region_mean": float((wide["clip_low"] + wide["clip_high"]).mean()),
        "clip_ratio/dual_mean": float(wide["dual_clip"].mean()),
        "old_logprobs_unknown": 0.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert loss_metrics(TokenLog(), 0.0) == {"loss": 0.0}


def logged(**columns: object) -> TokenLog:
    log = TokenLog()
    log.add({name: torch.as_tensor(column) for name, column in columns.items()})
    return log


def test_logs_of_several_versions_are_compared_as_one() -> None:
    """Each numbers its own samples; tokens that were not sampled under the version computed are left out."""
    old, new = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -3.25])
    yes = torch.tensor([True, True, True])
    one = logged(old_logprobs=old, logprobs=new, samples=[0, 0, 1], compared=[True, False, True])
    two = logged(old_logprobs=old, logprobs=new, samples=[0, 1, 1], compared=yes)
    found = mismatch_of(one, two, TokenLog())
    columns = (old[[0, 2, 0, 1, 2]].numpy(), new[[0, 2, 0, 1, 2]].numpy(), np.array([0, 1, 2, 3, 3]))
    assert found == mismatch_metrics(*columns)
    assert found["mismatch/tokens"] == 5
    assert mismatch_of(TokenLog()) == {}


def test_off_policy_metrics_are_those_of_the_ratio() -> None:
    old = torch.tensor([-1.0, -2.0, math.nan, -0.5])
    new = torch.tensor([-1.25, -1.0, -3.0, -0.5])
    ratio = np.exp([-0.25, 1.0, 0.0])
    assert off_policy_of(logged(old_logprobs=old, logprobs=new)) == pytest.approx(
        {
            "off_policy/ratio_mean": ratio.mean(),
            "off_policy/ratio_min": ratio.min(),
            "off_policy/ratio_max": ratio.max(),
            "off_policy/ess": ratio.sum() ** 2 / (3 * (ratio**2).sum()),
            "off_policy/kl_k3": (ratio - 1 - np.log(ratio)).mean(),
        }
    )
    assert off_policy_of(TokenLog()) == {}
    assert off_policy_of(logged(old_logprobs=[math.nan], logprobs=[-1.0])) == {}
