"""Corrections against their formulas in fp64, their bounds, and their independence of how a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hetero.errors import ArgumentError
from hetero.models.lora import lora_parameters
from hetero.train import Trainer, TrainSample
from hetero.train.correction import Correction, correction_metrics, correction_weights
from hetero.train.losses import LossConfig, LossInputs, compute_loss
from hetero.train.metrics import TokenLog

MODES = ("token_truncate", "token_mask", "sequence_mask", "geometric_mask")
TIGHT = {
    "token_truncate": Correction("token_truncate", high=1.1),
    "token_mask": Correction("token_mask", 0.8, 1.2),
    "sequence_mask": Correction("sequence_mask", 0.5, 1.5),
    "geometric_mask": Correction("geometric_mask", 0.95, 1.05),
}
N = 300


def make_inputs(seed: int = 0, spread: float = 0.2) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    sampled = -torch.rand(N, generator=g) * 4
    proximal = sampled + spread * torch.randn(N, generator=g)
    return LossInputs(
        logprobs=(proximal + 0.3 * torch.randn(N, generator=g)).requires_grad_(),
        old_logprobs=sampled,
        advantages=torch.randn(N, generator=g),
        weights=torch.rand(N, generator=g),
        ref_logprobs=sampled + spread * torch.randn(N, generator=g),
        proximal_logprobs=proximal,
        samples=torch.randint(0, 40, (N,), generator=g),
    )


def expected_weights(correction: Correction, inputs: LossInputs) -> torch.Tensor:
    """The definitions, token by token, with floats."""
    assert inputs.proximal_logprobs is not None
    assert inputs.samples is not None
    low, high = correction.bounds
    delta = (inputs.proximal_logprobs.double() - inputs.old_logprobs.double()).tolist()
    found = []
    for own, sample in zip(delta, inputs.samples.tolist(), strict=True):
        mates = [d for d, s in zip(delta, inputs.samples.tolist(), strict=True) if s == sample]
        rho = math.exp(own)
        if correction.mode == "token_truncate":
            found.append(min(rho, high))
        elif correction.mode == "token_mask":
            found.append(rho if low <= rho <= high else 0.0)
        else:
            mean = sum(mates) / (len(mates) if correction.mode == "geometric_mask" else 1)
            found.append(1.0 if low <= math.exp(mean) <= high else 0.0)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["ppo_clip", "importance_sampling", "reinforce"])
@pytest.mark.parametrize("mode", MODES)
def test_value_and_gradient_against_fp64(mode: str, kind: str) -> None:
    inputs = make_inputs()
    correction = TIGHT[mode]
    outputs = compute_loss(inputs, LossConfig(kind=kind, kl_coef=0.05, correction=correction))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    weights = expected_weights(correction, inputs)
    assert 0.1 < float((weights == 0).double().mean() if mode != "token_truncate" else weights.min()) < 0.95
    wide = inputs.logprobs.detach().double().requires_grad_()
    assert inputs.proximal_logprobs is not None
    assert inputs.ref_logprobs is not None
    ratio, advantages = (wide - inputs.proximal_logprobs.double()).exp(), inputs.advantages.double()
    objective = {
        "ppo_clip": torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages),
        "importance_sampling": ratio * advantages,
        "reinforce": advantages * wide,
    }[kind]
    delta = inputs.ref_logprobs.double() - wide
    expected = -weights * objective + 0.05 * (delta.exp() - delta - 1)
    (expected_gradient,) = torch.autograd.grad((inputs.weights.double() * expected).sum(), wide)
    torch.testing.assert_close(outputs.tokens["correction"].double(), weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(outputs.tokens["loss"].double(), expected.detach(), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_weight_has_no_gradient_and_the_policy_of_now_stands_in_for_an_unknown_one(mode: str) -> None:
    inputs = make_inputs()
    alone = replace(inputs, proximal_logprobs=None)
    outputs = compute_loss(alone, LossConfig(correction=TIGHT[mode]))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    factor = outputs.tokens["correction"]
    torch.testing.assert_close(gradient, -factor * inputs.advantages * inputs.weights, rtol=1e-6, atol=1e-7)
    unknown = torch.full((N,), math.nan)
    same = compute_loss(replace(inputs, proximal_logprobs=unknown), LossConfig(correction=TIGHT[mode]))
    assert torch.equal(same.tokens["loss"], outputs.tokens["loss"])


@pytest.mark.parametrize("mode", MODES)
def test_on_policy_every_weight_is_one_and_no_bit_changes(mode: str) -> None:
    inputs = make_inputs()
    inputs = replace(inputs, old_logprobs=inputs.logprobs.detach().clone(), proximal_logprobs=None)
    found = []
    for correction in (Correction(), Correction(mode)):  # type: ignore[arg-type]
        outputs = compute_loss(inputs, LossConfig(correction=correction))
        found.append((outputs.tokens["loss"], *torch.autograd.grad(outputs.loss, inputs.logprobs)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_unknown_and_extreme_values_stay_finite(mode: str) -> None:
    inputs = make_inputs(spread=0.001)
    inputs.old_logprobs[:3] = torch.tensor([math.nan, -math.inf, -1e5])
    samples = torch.arange(N)
    samples[4] = 0
    found = correction_weights(Correction(mode), inputs.old_logprobs, inputs.logprobs.detach(), samples)  # type: ignore[arg-type]
    assert torch.isfinite(found).all()
    assert found[1] == 1
    assert found[2] == (2.0 if mode == "token_truncate" else 0.0)


def test_bounds_that_make_no_sense_are_refused() -> None:
    for mode, low, high, message in (
        ("perhaps", None, None, "expected one of none, token_truncate"),
        ("none", None, 2.0, "has no bounds"),
        ("token_truncate", 0.5, None, "only has an upper bound"),
        ("token_mask", 1.5, None, "low <= 1 <= high"),
        ("token_mask", None, 0.9, "low <= 1 <= high"),
        ("geometric_mask", 1.0, 1.0, "low < high"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Correction(mode, low, high)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no policy sampled"):
        LossConfig(kind="sft", correction=Correction("token_mask"))


def log_of(lengths: list[int], masked: list[int]) -> TokenLog:
    """Samples of some lengths, the first tokens of each masked."""
    log = TokenLog()
    for sample, (length, count) in enumerate(zip(lengths, masked, strict=True)):
        weights = torch.ones(length)
        weights[:count] = 0
        log.add({"correction": weights, "samples": torch.full((length,), sample)})
    return log


def test_what_is_masked_by_length() -> None:
    def by_length(lengths: list[int], masked: list[int]) -> float:
        return correction_metrics(log_of(lengths, masked))["mismatch/masked_by_length"]

    assert by_length([1, 2, 10, 20], [0, 0, 0, 0]) == 0
    assert by_length([1, 2, 10, 20], [0, 0, 10, 20]) == 2
    assert by_length([1, 2, 10, 20], [1, 2, 0, 0]) == 0
    assert by_length([20, 1, 10, 2], [20, 1, 10, 2]) == 1
    assert by_length([4, 4, 4], [4, 0, 0]) == pytest.approx(1), "no long half among equals"
    assert by_length([4, 4, 4], [0, 0, 4]) == pytest.approx(1), "whatever their order"
    assert by_length([2, 4, 8], [2, 4, 8]) == pytest.approx(1), "the middle one belongs to both"
    assert by_length([2, 4, 8], [0, 0, 4]) == pytest.approx(2), "shares of each sample, not its tokens"
    metrics = correction_metrics(log_of([1, 2, 10, 20], [0, 1, 10, 0]))
    assert metrics["mismatch/masked_token_frac"] == 11 / 33
    assert metrics["mismatch/masked_seq_frac"] == 1 / 4
    assert metrics["mismatch/correction_mean"] == 22 / 33
    assert list(correction_metrics(TokenLog()).values()) == [0, 0, 0, 1]


def test_a_sequence_mask_falls_into_the_length_trap_and_a_geometric_one_does_not() -> None:
    """The same drift per token: the product grows with the length, the mean does not."""
    rng = np.random.default_rng(0)
    lengths = np.tile([5, 500], 100)
    samples = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    sampled = torch.zeros(len(samples))
    drift = torch.from_numpy(rng.normal(0.0, 0.1, len(samples))).float()
    found = {}
    for mode in ("sequence_mask", "geometric_mask"):
        log = TokenLog()
        weights = correction_weights(Correction(mode, high=1.5), sampled, drift, samples)  # type: ignore[arg-type]
        log.add({"correction": weights, "samples": samples})
        found[mode] = correction_metrics(log)
    assert found["sequence_mask"]["mismatch/masked_by_length"] > 1.9
    assert found["geometric_mask"]["mismatch/masked_by_length"] < 0.1


def stale(make_samples: Callable[..., list[TrainSample]]) -> list[TrainSample]:
    return [replace(s, adapter_version=-1) for s in make_samples(num_groups=4, size=6)]


@pytest.mark.parametrize("mode", MODES)
def test_gradient_and_metrics_do_not_depend_on_the_cut(
    mode: str, load_dense: Callable[..., PreTrainedModel], make_samples: Callable[..., list[TrainSample]]
) -> None:
    correction = {
        "sequence_mask": Correction("sequence_mask", 0.2, 3.0),
        "geometric_mask": Correction("geometric_mask", 0.7, 1.8),
    }.get(mode, Correction(mode))  # type: ignore[arg-type]
    samples, found = stale(make_samples), []
    for rows, parts in ((4096, 1), (40, 1), (4096, 4)):
        trainer = Trainer(load_dense(), micro_batch_tokens=rows, correction=correction)
        size = len(samples) // parts
        metrics = [trainer.forward_backward(samples[i * size : (i + 1) * size]) for i in range(parts)]
        found.append((trainer.gradients(), metrics))
    (whole, (told,)), (cut, (told_too,)), (called, _) = found
    for other in (cut, called):
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-7)
    names = [f"mismatch/{n}" for n in ("masked_token_frac", "masked_seq_frac", "masked_by_length")]
    assert [told[n] for n in names] == [told_too[n] for n in names]
    assert told["mismatch/correction_mean"] == pytest.approx(told_too["mismatch/correction_mean"])
    assert 0 < told["mismatch/masked_token_frac"] < 1 or mode == "token_truncate"


def test_a_step_in_which_everything_is_masked_changes_nothing(
    load_dense: Callable[..., PreTrainedModel], make_samples: Callable[..., list[TrainSample]]
) -> None:
    """Not even by the momentum of the steps before."""
    model = load_dense()
    trainer = Trainer(model, lr=1e-2, correction=Correction("token_mask", 1.0, 1.0 + 1e-9))
    fresh = make_samples()
    fresh = [replace(s, logprobs=p) for s, p in zip(fresh, trainer.score(fresh), strict=True)]
    trainer.forward_backward([replace(s, proximal_logprobs=s.logprobs) for s in fresh])
    assert trainer.optim_step()["lora/update_ratio"] > 0
    before = {name: p.detach().clone() for name, p in lora_parameters(model).items()}
    assert trainer.forward_backward(stale(make_samples))["mismatch/masked_token_frac"] == 1
    done = trainer.optim_step()
    assert (done["grad_norm"], done["optim/empty_steps"], done["optim/updates"]) == (0, 1, 1)
    assert done["lora/update_ratio"] == 0
    assert all(torch.equal(p, before[name]) for name, p in lora_parameters(model).items())


def test_several_updates_with_one_batch_are_decoupled(
    load_dense: Callable[..., PreTrainedModel], make_samples: Callable[..., list[TrainSample]]
) -> None:
    """The weight stays what it was when the update began; the ratio moves away from 1, and is clipped."""
    model = load_dense()
    trainer = Trainer(model, lr=3e-2, correction=Correction("token_truncate", high=1.5))
    samples = stale(make_samples)
    start = trainer.score(samples)
    samples = [replace(s, proximal_logprobs=p) for s, p in zip(samples, start, strict=True)]
    first = trainer.forward_backward(samples)
    trainer.optim_step()
    second = trainer.forward_backward(samples)
    assert first["clip_ratio/region_mean"] == 0
    assert second["clip_ratio/region_mean"] > 0
    assert first["mismatch/correction_mean"] == second["mismatch/correction_mean"] < 1.5
    bypass = Trainer(model, lr=3e-2)
    assert bypass.forward_backward(samples)["mismatch/correction_mean"] == 1
