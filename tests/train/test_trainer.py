"""The trainer on a dense model in PyTorch: gradients of the written-out loss, invariance, skips, resuming."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hetero.errors import ArgumentError, CapacityError, CheckpointError, DataError, ModelError, TrainingError
from hetero.models.load import load_model
from hetero.models.lora import adapter_version, lora_parameters
from hetero.train.batch import TrainSample
from hetero.train.trainer import Trainer

Load = Callable[..., PreTrainedModel]
Make = Callable[..., list[TrainSample]]
AGGREGATES = ["token_mean", "seq_mean_token_mean", "dr_grpo", "prompt_mean"]


def trainer_of(model: PreTrainedModel, **kwargs: Any) -> Trainer:
    return Trainer(model, **({"lr": 1e-2, "max_completion_tokens": 16} | kwargs))


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the reference."""
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in theirs.values()))


def written_out(model: PreTrainedModel, samples: list[TrainSample], aggregate: str) -> dict[str, Tensor]:
    """Gradient of the PPO loss from a plain Transformers forward per sample, aggregated as in the papers."""
    per_sample, groups = [], {}
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        logp = model(input_ids=tokens).logits[0, :-1].double().div(0.7).log_softmax(-1)
        logp = logp.gather(-1, tokens[0, 1:, None])[len(sample.prompt_ids) - 1 :, 0]
        ratio = (logp - torch.tensor(sample.logprobs, dtype=torch.float32).double()).exp()
        assert isinstance(sample.advantage, float)
        objective = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
        per_sample.append(-objective[torch.from_numpy(sample.trained)])
        groups.setdefault(sample.group, []).append(per_sample[-1])
    if aggregate == "token_mean":
        loss = torch.cat(per_sample).mean()
    elif aggregate == "seq_mean_token_mean":
        loss = torch.stack([tokens.mean() for tokens in per_sample]).mean()
    elif aggregate == "dr_grpo":
        loss = torch.stack([tokens.sum() / 16 for tokens in per_sample]).mean()
    else:
        loss = torch.stack([torch.cat(members).mean() for members in groups.values()]).mean()
    params = lora_parameters(model)
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_gradient_is_that_of_the_written_loss(load_dense: Load, make_samples: Make, aggregate: str) -> None:
    model, samples = load_dense(), make_samples()
    expected = written_out(model, samples, aggregate)
    trainer = trainer_of(model, aggregate=aggregate, temperature=0.7)
    trainer.forward_backward(samples)
    assert relative(trainer.gradients(), expected) < 1e-6


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_gradient_does_not_depend_on_the_cut(load_dense: Load, make_samples: Make, aggregate: str) -> None:
    model, samples = load_dense(), make_samples(num_groups=4)
    whole = trainer_of(model, aggregate=aggregate, micro_batch_tokens=10_000)
    metrics = whole.forward_backward(samples)
    expected = whole.gradients()
    order = [5, 3, 0, 15, 7, 2, 9, 1, 14, 4, 12, 6, 13, 10, 8, 11]
    for rows, calls in (
        (1, [samples]),
        (30, [samples[:8], samples[8:]]),
        (40, [[samples[i] for i in order]]),
    ):
        trainer = trainer_of(model, aggregate=aggregate, micro_batch_tokens=rows)
        parts = [trainer.forward_backward(call) for call in calls]
        assert sum(part["train/micro_batches"] for part in parts) > 2
        assert relative(trainer.gradients(), expected) < 1e-6
        if len(calls) == 1:
            assert parts[0]["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
            assert parts[0]["entropy"] == pytest.approx(metrics["entropy"], rel=1e-6)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_masked_samples_change_no_bit(load_dense: Load, make_samples: Make, aggregate: str) -> None:
    model, samples = load_dense(), make_samples()
    first = trainer_of(model, aggregate=aggregate)
    plain = first.forward_backward(samples)
    expected = first.gradients()
    masked = dataclasses.replace(samples[0], completion_ids=[1] * 40, logprobs=[0.0] * 40, mask=[False] * 40)
    second = trainer_of(model, aggregate=aggregate)
    metrics = second.forward_backward([*samples, masked])
    assert all(torch.equal(second.gradients()[name], gradient) for name, gradient in expected.items())
    assert metrics == plain | {"train/samples_masked": 1.0}


def flatten(samples: list[TrainSample], groups: set[int]) -> list[TrainSample]:
    return [dataclasses.replace(s, advantage=0.0) if s.group in groups else s for s in samples]


def test_groups_without_spread_are_skipped_and_counted(load_dense: Load, make_samples: Make) -> None:
    model, samples = load_dense(), make_samples()
    with_flat = flatten(samples, {1})
    trainer = trainer_of(model)
    metrics = trainer.forward_backward(with_flat)
    alone = trainer_of(model)
    expected = alone.forward_backward([sample for sample in samples if sample.group != 1])
    skipped = {"train/groups_skipped": 1.0}
    assert metrics == expected | skipped
    assert all(torch.equal(trainer.gradients()[name], g) for name, g in alone.gradients().items())


def test_dr_grpo_counts_skipped_samples_in_its_constant(load_dense: Load, make_samples: Make) -> None:
    model, samples = load_dense(), make_samples()
    with_flat = flatten(samples, {1})
    trainer = trainer_of(model, aggregate="dr_grpo")
    trainer.forward_backward(with_flat)
    expected = {name: g * 2 / 3 for name, g in gradients_of(model, samples, {0, 2}).items()}
    assert relative(trainer.gradients(), expected) < 1e-6


def gradients_of(model: PreTrainedModel, samples: list[TrainSample], groups: set[int]) -> dict[str, Tensor]:
    trainer = trainer_of(model, aggregate="dr_grpo")
    trainer.forward_backward([sample for sample in samples if sample.group in groups])
    return trainer.gradients()


def test_kl_term_keeps_groups_without_spread(load_dense: Load, make_samples: Make) -> None:
    trainer = trainer_of(load_dense(), kl_coef=0.1)
    metrics = trainer.forward_backward(flatten(make_samples(), {0, 1, 2}))
    assert metrics["train/groups_skipped"] == 0
    assert metrics["kl"] > 0
    assert trainer.optim_step()["grad_norm"] > 0


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    state = {name: param.detach().clone() for name, param in trainer.params.items()}
    return state | {name: tensor.clone() for name, tensor in trainer.optimizer.state_dict().items()}


def unchanged(trainer: Trainer, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], tensor) for name, tensor in snapshot(trainer).items())


def test_a_step_without_spread_updates_nothing_but_compares(load_dense: Load, make_samples: Make) -> None:
    model = load_dense()
    trainer = trainer_of(model)
    samples = flatten(make_samples(), {0, 1, 2})
    before = snapshot(trainer)
    metrics = trainer.forward_backward(samples)
    assert metrics["train/groups_skipped"] == 3
    assert metrics["train/tokens"] == metrics["train/samples"] == metrics["loss"] == 0
    assert metrics["mismatch/logp_abs_max"] > 0
    step = trainer.optim_step()
    assert (step["grad_norm"], step["optim/empty_steps"], step["optim/updates"]) == (0, 1, 0)
    assert unchanged(trainer, before)
    assert adapter_version(model) == 0
    trainer.forward_backward(make_samples())
    assert trainer.optim_step()["optim/updates"] == 1
    assert adapter_version(model) == 1


def test_nothing_to_train_is_an_error_for_data_only(load_dense: Load, make_samples: Make) -> None:
    model = load_dense()
    masked = [dataclasses.replace(s, mask=[False] * len(s.completion_ids)) for s in make_samples()]
    with pytest.raises(DataError, match="mask"):
        trainer_of(model, loss="sft").forward_backward(masked)
    trainer = trainer_of(model)
    assert trainer.forward_backward(masked)["train/samples_masked"] == len(masked)
    assert trainer.optim_step()["optim/empty_steps"] == 1
    with pytest.raises(DataError, match="no samples"):
        trainer.forward_backward([])


def test_nonfinite_gradient_is_skipped_counted_and_ends_the_run(load_dense: Load, make_samples: Make) -> None:
    model = load_dense()
    trainer = trainer_of(model)
    before = snapshot(trainer)
    for count in (1, 2, 3):
        trainer.forward_backward(make_samples())
        gradient = trainer.params[next(iter(trainer.params))].grad
        assert gradient is not None
        gradient.view(-1)[0] = math.nan
        if count < 3:
            assert trainer.optim_step()["optim/nonfinite_steps"] == count
        else:
            with pytest.raises(TrainingError, match="not finite in 3 steps"):
                trainer.optim_step()
        assert unchanged(trainer, before)
    assert adapter_version(model) == 0
    trainer.forward_backward(make_samples())
    assert math.isfinite(trainer.optim_step()["grad_norm"])


def test_a_failed_call_leaves_no_gradient(load_dense: Load, make_samples: Make) -> None:
    trainer = trainer_of(load_dense(), micro_batch_tokens=20)
    trainer.forward_backward(make_samples())
    for wrong, said in (([1, -1], "token id -1; the model knows the ids 0 to 63"), ([64], "token id 64")):
        with pytest.raises(DataError, match=said):
            trainer.forward_backward([*make_samples(), TrainSample(wrong, [5], [0.0], group=9)])
    assert not any(bool(param.grad.any()) for param in trainer.params.values() if param.grad is not None)
    with pytest.raises(TrainingError, match="without forward_backward"):
        trainer.optim_step()


def test_clipping_bounds_the_applied_gradient(load_dense: Load, make_samples: Make) -> None:
    norms = {}
    for limit in (math.inf, 1e-3):
        trainer = trainer_of(load_dense(), max_grad_norm=limit, eps=1.0, betas=(0.0, 0.0), lr=1.0)
        before = {name: param.detach().clone() for name, param in trainer.params.items()}
        trainer.forward_backward(make_samples())
        expected = trainer.gradients()
        reported = trainer.optim_step()["grad_norm"]
        assert reported == pytest.approx(
            math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
        )
        # With beta = 0 and eps = 1 the step is g / (|g| + 1), close to g when g is small.
        norms[limit] = math.sqrt(
            sum(float((p.detach() - before[n]).square().sum()) for n, p in trainer.params.items())
        )
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert norms[math.inf] > 1e-2


def test_score_is_the_plain_models_logprob_with_and_without_adapter(
    load_dense: Load, make_samples: Make, tiny_dense_dir: Path
) -> None:
    model, samples = load_dense(torch.float32), make_samples()
    base = load_model(tiny_dense_dir, dense="torch", device="cpu", dtype=torch.float32)
    trainer = trainer_of(model, temperature=0.7, micro_batch_tokens=25)
    for scored, reference in ((model, False), (base, True)):
        scores = trainer.score(samples, reference=reference)
        for sample, values in zip(samples, scores, strict=True):
            tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
            with torch.no_grad():
                logp = scored(input_ids=tokens).logits[0, :-1].float().div(0.7).log_softmax(-1)
            expected = logp.gather(-1, tokens[0, 1:, None])[len(sample.prompt_ids) - 1 :, 0]
            torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-5)


def with_scores(
    trainer: Trainer, samples: list[TrainSample], version: int | None = None
) -> list[TrainSample]:
    scores = trainer.score(samples)
    return [
        dataclasses.replace(sample, logprobs=logprobs, adapter_version=version)
        for sample, logprobs in zip(samples, scores, strict=True)
    ]


def test_mismatch_covers_samples_of_the_current_version_only(load_dense: Load, make_samples: Make) -> None:
    model = load_dense()
    trainer = trainer_of(model)
    fresh = with_scores(trainer, make_samples(), version=0)
    metrics = trainer.forward_backward(fresh)
    assert metrics["mismatch/logp_abs_max"] < 1e-5
    assert metrics["off_policy/version_lag_max"] == 0
    trainer.optim_step()
    again = trainer.forward_backward(fresh)
    assert not {"mismatch/tokens", "mismatch/logp_abs_max"} & again.keys()
    assert again["off_policy/version_lag_mean"] == 1
    assert again["approx_kl"] > metrics["approx_kl"] >= 0
    mixed = [*fresh[:4], *with_scores(trainer, fresh[4:], version=1)]
    assert trainer.forward_backward(mixed)["mismatch/logp_abs_max"] < 1e-5


def test_policy_losses_need_recorded_logprobs(load_dense: Load, make_samples: Make) -> None:
    samples = [dataclasses.replace(sample, logprobs=None) for sample in make_samples()]
    with pytest.raises(DataError, match="sample 0 has no logprobs"):
        trainer_of(load_dense()).forward_backward(samples)
    assert trainer_of(load_dense(), loss="reinforce").forward_backward(samples)["loss"] != 0


def test_calls_out_of_order_are_errors(load_dense: Load, make_samples: Make, tmp_path: Path) -> None:
    trainer = trainer_of(load_dense())
    with pytest.raises(TrainingError, match="without forward_backward"):
        trainer.optim_step()
    trainer.forward_backward(make_samples())
    with pytest.raises(TrainingError, match="would lose"):
        trainer.save(tmp_path / "step-1")


def test_longer_than_the_context_is_an_error_at_once(load_dense: Load, make_samples: Make) -> None:
    trainer = trainer_of(load_dense())
    long = TrainSample([1] * 50, [2] * 47, [0.0] * 47, advantage=1.0, group=9)
    with pytest.raises(CapacityError, match="context of the model is 96"):
        trainer.forward_backward([*make_samples(), long])


def train(trainer: Trainer, make_samples: Make, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        samples = make_samples(seed=100 + step)
        metrics.append(trainer.forward_backward(samples) | trainer.optim_step())
    return metrics


SETTINGS: dict[str, Any] = {"schedule": "cosine", "total_steps": 8, "warmup_steps": 2, "weight_decay": 0.1}


def test_resuming_equals_going_on_bit_for_bit(load_dense: Load, make_samples: Make, tmp_path: Path) -> None:
    straight = trainer_of(load_dense(), **SETTINGS)
    expected = train(straight, make_samples, range(6))
    first = trainer_of(load_dense(), **SETTINGS)
    train(first, make_samples, range(3))
    first.save(tmp_path / "step-3")
    drawn = torch.rand(3)
    second_model = load_dense()
    second = trainer_of(second_model, **SETTINGS)
    second.load(tmp_path / "step-3")
    assert torch.equal(torch.rand(3), drawn)
    assert adapter_version(second_model) == 3
    assert train(second, make_samples, range(3, 6)) == expected[3:]
    assert unchanged(second, snapshot(straight))


def test_load_refuses_another_adapter_untouched(load_dense: Load, make_samples: Make, tmp_path: Path) -> None:
    saved = trainer_of(load_dense())
    train(saved, make_samples, range(1))
    saved.save(tmp_path / "step-1")
    other = trainer_of(load_dense(targets=("attention",)))
    before = snapshot(other)
    with pytest.raises(CheckpointError, match="lora"):
        other.load(tmp_path / "step-1")
    assert unchanged(other, before)


def test_loading_never_reuses_a_version(load_dense: Load, make_samples: Make, tmp_path: Path) -> None:
    model = load_dense()
    trainer = trainer_of(model)
    train(trainer, make_samples, range(1))
    trainer.save(tmp_path / "step-1")
    train(trainer, make_samples, range(1, 3))
    trainer.load(tmp_path / "step-1")
    assert adapter_version(model) == 4
    trainer.load(tmp_path / "step-1")
    assert adapter_version(model) == 4


def test_supervised_loss_falls_on_a_toy(load_dense: Load) -> None:
    trainer = trainer_of(load_dense(torch.float32), loss="sft", lr=3e-2)
    samples = [TrainSample([1, 2, 3], [i, i + 1, 4], group=i) for i in (10, 10, 20)]
    losses = []
    for _ in range(40):
        losses.append(trainer.forward_backward(samples)["loss"])
        trainer.optim_step()
    assert losses[0] > 3
    assert losses[-1] < 0.35  # the first token is 10 twice and 20 once: 0.64 nats over 3 tokens is the floor


def test_policy_gradient_raises_the_rewarded_token(load_dense: Load) -> None:
    trainer = trainer_of(load_dense(torch.float32), lr=1e-2)
    samples = [TrainSample([1, 2], [token], group=0, advantage=a) for token, a in ((5, 1.0), (6, -1.0))]
    start = trainer.score(samples)
    for _ in range(5):
        trainer.forward_backward(with_scores(trainer, samples))
        trainer.optim_step()
    end = trainer.score(samples)
    assert end[0][0] > start[0][0] + 0.1
    assert end[1][0] < start[1][0] - 0.1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"checkpointing": "full"}, "layer"),
        ({"schedule": "linear"}, "total_steps"),
        ({"loss": "ppo"}, "ppo_clip"),
    ],
)
def test_bad_settings_say_what_is_expected(load_dense: Load, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        trainer_of(load_dense(), **kwargs)


def test_a_model_without_adapter_is_refused(tiny_dense_dir: Path) -> None:
    with pytest.raises(ModelError, match="LoraConfig"):
        Trainer(load_model(tiny_dense_dir, dense="torch", device="cpu"))


def test_nothing_grows_over_steps(load_dense: Load, make_samples: Make) -> None:
    trainer = trainer_of(load_dense())

    def held() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    train(trainer, make_samples, range(2))
    before = held()
    train(trainer, make_samples, range(2, 6))
    assert held() <= before
