"""Token losses against their formulas written out in fp64, and the aggregation weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetero.errors import ArgumentError
from hetero.train.losses import LOSSES, LossConfig, LossInputs, aggregate_weights, compute_loss

N = 400


def make_inputs(seed: int = 0, spread: float = 0.5) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(N, generator=g) * 4
    return LossInputs(
        logprobs=(old + spread * torch.randn(N, generator=g)).requires_grad_(),
        old_logprobs=old,
        advantages=torch.randn(N, generator=g),
        weights=torch.rand(N, generator=g),
        ref_logprobs=old + spread * torch.randn(N, generator=g),
    )


def formula(kind: str, logp: Tensor, inputs: LossInputs, dual: float | None, kl_coef: float) -> Tensor:
    """The definitions, token by token, in fp64, with min and clip written as in the papers."""
    old, adv = inputs.old_logprobs.double(), inputs.advantages.double()
    ratio = (logp - old).exp()
    if kind == "ppo_clip":
        objective = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.28) * adv)
        if dual is not None:
            objective = torch.where(adv < 0, torch.maximum(objective, dual * adv), objective)
    elif kind == "importance_sampling":
        objective = ratio * adv
    else:
        objective = adv * logp if kind == "reinforce" else logp
    loss = -objective
    if kl_coef:
        assert inputs.ref_logprobs is not None
        log_ratio = inputs.ref_logprobs.double() - logp
        loss = loss + kl_coef * (log_ratio.exp() - log_ratio - 1)
    return loss


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("kind", list(LOSSES))
def test_value_and_gradient_against_fp64(kind: str, dual: float | None, kl_coef: float) -> None:
    inputs = make_inputs()
    outputs = compute_loss(inputs, LossConfig(kind=kind, dual_clip=dual, kl_coef=kl_coef))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    wide = inputs.logprobs.detach().double().requires_grad_()
    expected = formula(kind, wide, inputs, dual, kl_coef)
    (expected_gradient,) = torch.autograd.grad((inputs.weights.double() * expected).sum(), wide)
    torch.testing.assert_close(outputs.tokens["loss"].double(), expected.detach(), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=3e-6, atol=3e-6)


def test_on_policy_ratio_is_one_and_nothing_is_clipped() -> None:
    inputs = make_inputs(spread=0.0)
    outputs = compute_loss(inputs, LossConfig())
    assert not outputs.tokens["clip_low"].any()
    assert not outputs.tokens["clip_high"].any()
    assert torch.equal(outputs.tokens["loss"], -inputs.advantages)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    assert torch.equal(gradient, -inputs.advantages * inputs.weights)


def test_clip_marks_exactly_the_tokens_without_gradient() -> None:
    inputs = make_inputs(spread=1.0)
    outputs = compute_loss(inputs, LossConfig(dual_clip=2.0))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    marked = outputs.tokens["clip_low"] | outputs.tokens["clip_high"] | outputs.tokens["dual_clip"]
    assert torch.equal(gradient == 0, marked)
    for name in ("clip_low", "clip_high", "dual_clip"):
        assert outputs.tokens[name].any(), f"the case does not exercise {name}"


@pytest.mark.parametrize("unknown", [math.nan, -math.inf])
def test_unknown_old_logprob_means_ratio_one(unknown: float) -> None:
    inputs = make_inputs()
    inputs.old_logprobs[7] = unknown
    outputs = compute_loss(inputs, LossConfig())
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    assert torch.isfinite(outputs.loss)
    assert outputs.tokens["loss"][7] == -inputs.advantages[7]
    assert gradient[7] == -inputs.advantages[7] * inputs.weights[7]


def test_extreme_ratios_stay_finite() -> None:
    inputs = make_inputs()
    inputs.old_logprobs[0], inputs.old_logprobs[1] = -1e4, 0.0
    with torch.no_grad():
        inputs.logprobs[0], inputs.logprobs[1] = 0.0, -1e4
    outputs = compute_loss(inputs, LossConfig(kl_coef=0.1))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(gradient).all()


COUNTS = torch.tensor([3, 1, 4, 2, 10])
GROUPS = torch.tensor([5, 5, 2, 2, 9])


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", lambda s, t: 1 / 20),
        ("seq_mean_token_mean", lambda s, t: 1 / (5 * t)),
        ("dr_grpo", lambda s, t: 1 / (5 * 64)),
        ("prompt_mean", lambda s, t: 1 / (3 * [4, 4, 6, 6, 10][s])),
    ],
)
def test_weight_of_a_token_in_the_batch_loss(aggregate: str, expected: Callable[[int, int], float]) -> None:
    config = LossConfig(aggregate=aggregate, max_completion_tokens=64)  # type: ignore[arg-type]
    weights, denominator = aggregate_weights(COUNTS, GROUPS, config)
    for sample, count in enumerate(COUNTS.tolist()):
        assert float(weights[sample]) / denominator == pytest.approx(expected(sample, count), rel=1e-12)


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean", "dr_grpo", "prompt_mean"])
def test_weights_add_up_over_calls_that_keep_groups_together(aggregate: str) -> None:
    config = LossConfig(aggregate=aggregate, max_completion_tokens=64)  # type: ignore[arg-type]
    weights, denominator = aggregate_weights(COUNTS, GROUPS, config)
    first = aggregate_weights(COUNTS[:2], GROUPS[:2], config)
    second = aggregate_weights(COUNTS[2:], GROUPS[2:], config)
    assert torch.equal(torch.cat([first[0], second[0]]), weights)
    assert first[1] + second[1] == denominator


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "ppo"}, "ppo_clip"),
        ({"aggregate": "mean"}, "token_mean"),
        ({"aggregate": "dr_grpo"}, "max_completion_tokens"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"kl_coef": -1.0}, "kl_coef"),
    ],
)
def test_bad_settings_say_what_is_expected(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LossConfig(**kwargs)  # type: ignore[arg-type]
