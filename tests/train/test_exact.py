"""The trainer on the CPU kernels with a tiny Mixtral: bits that depend on nothing, gradients against fp64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import MixtralForCausalLM, PreTrainedModel

from hetero.kernels.cpu import Context, using
from hetero.models.lora import bump_adapter_version, lora_parameters
from hetero.train.batch import TrainSample
from hetero.train.trainer import Trainer

Load = Callable[..., PreTrainedModel]
Make = Callable[..., list[TrainSample]]


def scored(trainer: Trainer, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples as if the trainer's own policy had sampled them."""
    scores = trainer.score(samples)
    return [dataclasses.replace(s, logprobs=values) for s, values in zip(samples, scores, strict=True)]


def run_once(model: PreTrainedModel, samples: list[TrainSample], **kwargs: Any) -> dict[str, Tensor]:
    trainer = Trainer(model, **kwargs)
    trainer.forward_backward(samples)
    return trainer.gradients()


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in theirs.values()))


def test_logprobs_do_not_depend_on_packing(load_moe: Load, make_samples: Make) -> None:
    """Long prompts, so that attention crosses blocks; every packing, and every sample alone."""
    model, samples = load_moe(), make_samples(num_groups=4, vocab=250, prompt_len=60)
    expected = Trainer(model, micro_batch_tokens=10_000).score(samples)
    assert all(math.isfinite(value) for values in expected for value in values)
    for rows in (1, 50, 100):
        assert Trainer(model, micro_batch_tokens=rows).score(samples) == expected
    assert [Trainer(model).score([sample])[0] for sample in samples] == expected
    assert Trainer(model).score(samples[::-1])[::-1] == expected


def test_training_forward_has_the_bits_of_scoring(load_moe: Load, make_samples: Make) -> None:
    model = load_moe()
    trainer = Trainer(model, micro_batch_tokens=64)
    samples = scored(Trainer(model, micro_batch_tokens=1), make_samples(vocab=250, prompt_len=40))
    metrics = trainer.forward_backward(samples)
    assert metrics["mismatch/logp_abs_max"] == metrics["mismatch/kl_k3"] == 0
    assert metrics["mismatch/bitwise_equal_frac"] == 1
    assert metrics["clip_ratio/region_mean"] == metrics["approx_kl"] == 0


def test_mismatch_stays_zero_over_updates_and_sees_a_changed_adapter(
    load_moe: Load, make_samples: Make
) -> None:
    model = load_moe()
    trainer = Trainer(model, lr=1e-2)
    for step in range(3):
        metrics = trainer.forward_backward(scored(trainer, make_samples(seed=step, vocab=250)))
        assert metrics["mismatch/logp_abs_max"] == 0
        assert trainer.optim_step()["grad_norm"] > 0
    stale = scored(trainer, make_samples(vocab=250))
    with torch.no_grad():
        next(iter(trainer.params.values())).mul_(1.5)
    bump_adapter_version(model)
    assert trainer.forward_backward(stale)["mismatch/logp_abs_max"] > 0


@pytest.mark.parametrize("expert_layout", ["shared_outer", "per_expert"])
def test_layer_checkpointing_changes_no_bit(load_moe: Load, make_samples: Make, expert_layout: str) -> None:
    model, samples = load_moe(expert_layout=expert_layout), make_samples(vocab=250)
    kept = run_once(model, samples, checkpointing="none")
    recomputed = run_once(model, samples, checkpointing="layer")
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in kept.items())
    assert all(bool(gradient.any()) for gradient in kept.values()), "a factor without gradient proves nothing"


def test_threads_change_no_bit(load_moe: Load, make_samples: Make) -> None:
    model, samples = load_moe(), make_samples(vocab=250, prompt_len=40)
    results = []
    for threads in (1, 2, 3):
        with using(Context(threads=threads)):
            trainer = Trainer(model)
            results.append((trainer.score(samples), run_once(model, samples)))
    for scores, gradients in results[1:]:
        assert scores == results[0][0]
        assert all(torch.equal(gradients[name], g) for name, g in results[0][1].items())


def test_gradient_hardly_depends_on_the_cut(load_moe: Load, make_samples: Make) -> None:
    """Only by bf16 rounding of what shared rows pass back: far from what one token more or less would do."""
    model, samples = load_moe(), make_samples(num_groups=4, vocab=250)
    whole = run_once(model, samples, micro_batch_tokens=10_000)
    for rows in (1, 40):
        assert relative(run_once(model, samples, micro_batch_tokens=rows), whole) < 0.015


def test_reference_is_the_base_model_to_the_bit(load_moe: Load, make_samples: Make) -> None:
    model, samples = load_moe(), make_samples(vocab=250)
    trainer = Trainer(model, kl_coef=0.1)
    reference = trainer.score(samples, reference=True)
    assert reference != trainer.score(samples)
    with torch.no_grad():
        for name, parameter in lora_parameters(model).items():
            if name.rpartition("_")[2] == "b":
                parameter.zero_()
    assert trainer.score(samples) == reference
    assert trainer.forward_backward(samples)["kl"] == 0


class Plain:
    """Transformers' eager Mixtral in fp64, its weights W + scale * B A differentiable in the factors."""

    def __init__(self, directory: Path, adapted: PreTrainedModel) -> None:
        model = MixtralForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="eager"
        )
        self.model = model.double()
        self.model.set_experts_implementation("eager")
        self.factors = {
            name: parameter.detach().bfloat16().double().requires_grad_()
            for name, parameter in lora_parameters(adapted).items()
        }

    def run(self, sample: TrainSample) -> tuple[Tensor, float]:
        """Log-probabilities of the completion, and how near any token is to another routing."""
        weights = adapted_weights(dict(self.model.named_parameters()), self.factors, scale=8.0 / 4)
        tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        inputs = {"input_ids": tokens, "use_cache": False, "output_router_logits": True}
        out = functional_call(self.model, weights, kwargs=inputs)
        best = torch.cat(out.router_logits).topk(3).values
        logp = out.logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        return logp[len(sample.prompt_ids) - 1 :], float((best[:, 1] - best[:, 2]).detach().min())

    def gradients(self, samples: list[TrainSample]) -> dict[str, Tensor]:
        """Of the token-mean policy gradient loss at ratio 1."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            assert isinstance(sample.advantage, float)
            total = total - sample.advantage * self.run(sample)[0][torch.from_numpy(sample.trained)].sum()
            count += int(sample.trained.sum())
        gradients = torch.autograd.grad(total / count, list(self.factors.values()))
        return dict(zip(self.factors, gradients, strict=True))


def adapted_weights(
    weights: dict[str, Tensor], factors: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """The weights that carry an adapter, as products of its factors: nn.Linear and fused experts."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, factor in factors.items():
        module, _, part = name.rpartition(".lora_")
        modules.setdefault(module, {})[part] = factor
    adapted = {}
    for module, parts in modules.items():
        if "a" in parts:
            adapted[f"{module}.weight"] = weights[f"{module}.weight"] + scale * parts["b"] @ parts["a"]
            continue
        gate, up = (parts[f"{p}_b"] @ parts[f"{p}_a"] for p in ("gate", "up"))
        adapted[f"{module}.gate_up_proj"] = weights[f"{module}.gate_up_proj"] + scale * torch.cat(
            [gate, up], 1
        )
        adapted[f"{module}.down_proj"] = (
            weights[f"{module}.down_proj"] + scale * parts["down_b"] @ parts["down_a"]
        )
    return adapted


@pytest.mark.parametrize("expert_layout", ["shared_outer", "per_expert"])
def test_adapter_gradients_against_fp64_autograd(
    load_moe: Load, make_samples: Make, tiny_moe_dir: Path, expert_layout: str
) -> None:
    """Samples near a tie in a router are left out: there bf16 and fp64 may take different experts."""
    model = load_moe(expert_layout=expert_layout)
    plain = Plain(tiny_moe_dir, model)
    drawn = make_samples(num_groups=8, vocab=250)
    samples = scored(Trainer(model), [sample for sample in drawn if plain.run(sample)[1] > 1e-3])
    assert len(samples) >= 6
    ours = run_once(model, samples)
    expected = plain.gradients(samples)
    assert ours.keys() == expected.keys()
    experts = {name: gradient for name, gradient in expected.items() if ".experts." in name}
    assert experts
    assert relative(ours, experts) < 0.01
    assert relative(ours, expected) < 0.01
    for name, gradient in expected.items():
        assert relative(ours, {name: gradient}) < 0.04, name


def train(trainer: Trainer, make_samples: Make, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        samples = scored(trainer, make_samples(seed=100 + step, vocab=250))
        metrics.append(trainer.forward_backward(samples) | trainer.optim_step())
    return metrics


def test_six_steps_equal_three_and_three_after_resuming(
    load_moe: Load, make_samples: Make, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "schedule": "linear", "total_steps": 8, "warmup_steps": 1}
    straight = Trainer(load_moe(), **settings)
    expected = train(straight, make_samples, range(6))
    first = Trainer(load_moe(), **settings)
    train(first, make_samples, range(3))
    first.save(tmp_path / "step-3")
    second = Trainer(load_moe(), **settings)
    second.load(tmp_path / "step-3")
    assert train(second, make_samples, range(3, 6)) == expected[3:]
    assert all(torch.equal(second.params[name], param) for name, param in straight.params.items())
    states = zip(
        second.optimizer.state_dict().values(), straight.optimizer.state_dict().values(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in states)


def test_reward_rises_on_a_toy(load_moe: Load) -> None:
    """Two answers to one prompt, the first one right: its probability must rise."""
    trainer = Trainer(load_moe(), lr=1e-2)
    samples = [TrainSample([1, 2, 3], [token, 4], advantage=a) for token, a in ((5, 1.0), (6, -1.0))]
    values = []
    for _ in range(6):
        current = scored(trainer, samples)
        assert current[0].logprobs is not None
        values.append(current[0].logprobs[0])
        trainer.forward_backward(current)
        trainer.optim_step()
    assert values[-1] > values[0] + 0.3
