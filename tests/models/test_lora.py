"""Placing LoRA on a model, switching it off, and counting its versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hetero.errors import ModelError
from hetero.models import load_model
from hetero.models.lora import (
    LoraConfig,
    adapter_version,
    attach_lora,
    bump_adapter_version,
    detach_lora,
    lora_disabled,
    lora_parameters,
)
from hetero.models.lora_linear import LoraLinear

Checkpoint = Callable[[str], Path]
IDS = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


@torch.no_grad()
def _nudge(model: PreTrainedModel) -> None:
    for parameter in lora_parameters(model).values():
        parameter.add_(0.1)


def _reached(model: PreTrainedModel) -> set[str]:
    """Adapted modules of the last layer, without its prefix."""
    return {name.split(".", 3)[3] for name in lora_parameters(model) if name.startswith("model.layers.1.")}


ATTENTION = {f"self_attn.{p}_proj.lora_{side}" for p in "qkvo" for side in "ab"}
EXPERTS = {f"mlp.experts.lora_{p}_{side}" for p in ("gate", "up", "down") for side in "ab"}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mixtral", ATTENTION | EXPERTS),
        ("gpt_oss", ATTENTION | EXPERTS),
        (
            "qwen2_moe",
            ATTENTION
            | EXPERTS
            | {f"mlp.shared_expert.{p}_proj.lora_{side}" for p in ("gate", "up", "down") for side in "ab"},
        ),
        (
            "deepseek_v3",
            EXPERTS
            | {f"mlp.shared_experts.{p}_proj.lora_{side}" for p in ("gate", "up", "down") for side in "ab"}
            | {
                f"self_attn.{p}.lora_{side}"
                for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
                for side in "ab"
            },
        ),
    ],
)
def test_default_targets(family: str, expected: set[str], checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint(family), device="cpu", lora=LoraConfig(rank=2))
    assert _reached(model) == expected
    assert not any("lm_head" in name for name in lora_parameters(model))
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in lora_parameters(model).values()}


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
def test_shapes_scales_and_first_values(layout: str, checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    base = _logits(model)
    attach_lora(model, LoraConfig(rank=6, alpha=12.0, expert_layout=layout, expert_rank=3), seed=4)
    assert torch.equal(_logits(model), base), "B is zero, so nothing changes"
    shared = layout == "shared_outer"
    factors = {name.removeprefix("model.layers.0."): p for name, p in lora_parameters(model).items()}
    experts = {
        name.rpartition("lora_")[2]: p for name, p in factors.items() if name.startswith("mlp.experts")
    }
    assert {part: tuple(p.shape) for part, p in experts.items()} == {
        "gate_a": (3, 64) if shared else (4, 3, 64),
        "gate_b": (4, 96, 3),
        "up_a": (3, 64) if shared else (4, 3, 64),
        "up_b": (4, 96, 3),
        "down_a": (4, 3, 96),
        "down_b": (64, 3) if shared else (4, 64, 3),
    }
    assert model.model.layers[0].mlp.experts.lora.scale == 4.0
    assert model.model.layers[0].self_attn.q_proj.lora.scale == 2.0
    for name, parameter in factors.items():
        if name.endswith("b"):
            assert not parameter.any()
        else:
            bound = parameter.shape[-1] ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound


def test_first_values_depend_on_seed_and_name_only(checkpoint: Checkpoint) -> None:
    def draw(targets: tuple[str, ...], seed: int) -> dict[str, torch.Tensor]:
        model = load_model(checkpoint("mixtral"), device="cpu")
        attach_lora(model, LoraConfig(rank=2, targets=targets), seed=seed)
        return {name: parameter.detach() for name, parameter in lora_parameters(model).items()}

    torch.manual_seed(0)
    first = draw(("attention", "experts"), 1)
    torch.manual_seed(99)
    subset = draw((r".*\.v_proj",), 1)
    assert subset.keys() < first.keys()
    assert all(torch.equal(subset[name], first[name]) for name in subset)
    other = draw((r".*\.v_proj",), 2)
    name = "model.layers.0.self_attn.v_proj.lora_a"
    assert not torch.equal(subset[name], other[name])
    assert not torch.equal(subset[name], subset[name.replace("layers.0", "layers.1")])


def test_disabled_is_the_base_bit_for_bit(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("qwen2_moe"), device="cpu")
    base = _logits(model)
    attach_lora(model, LoraConfig(rank=2))
    _nudge(model)
    adapted = _logits(model)
    assert not torch.equal(adapted, base)
    with lora_disabled(model):
        assert torch.equal(_logits(model), base)
        with lora_disabled(model):
            assert torch.equal(_logits(model), base)
        assert torch.equal(_logits(model), base)
    assert torch.equal(_logits(model), adapted)
    with pytest.raises(RuntimeError, match="inside"), lora_disabled(model):
        raise RuntimeError("inside")
    assert torch.equal(_logits(model), adapted)
    detach_lora(model)
    assert torch.equal(_logits(model), base)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
def test_every_factor_learns(family: str, layout: str, checkpoint: Checkpoint) -> None:
    model = load_model(
        checkpoint(family), device="cpu", lora=LoraConfig(rank=2, alpha=2.0, expert_layout=layout)
    )
    _nudge(model)  # gently: beyond the clamp of gpt-oss gradients are rightly zero
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    still = [name for name, p in lora_parameters(model).items() if p.grad is None or not p.grad.any()]
    assert not still
    assert all(p.grad.dtype == torch.float32 for p in lora_parameters(model).values())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_versions(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu", lora=LoraConfig(rank=2))
    start = adapter_version(model)
    assert bump_adapter_version(model) == start + 1 == adapter_version(model)
    assert bump_adapter_version(model, to=17) == 17 == adapter_version(model)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("mlp",), "'mlp' reaches no module"),
        (("attention", "mlp"), "'mlp' reaches no module"),
        (("attention", r".*\.query"), r"experts\.gate_proj.*self_attn\.q_proj"),
        (("*.q_proj",), "regular expression"),
    ],
)
def test_a_target_that_reaches_nothing_says_what_there_is(
    targets: tuple[str, ...], message: str, checkpoint: Checkpoint
) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    with pytest.raises(ModelError, match=message):
        attach_lora(model, LoraConfig(targets=targets))
    assert not lora_parameters(model)


def test_a_second_adapter_is_refused(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu", lora=LoraConfig(rank=2))
    with pytest.raises(ModelError, match="detach_lora"):
        attach_lora(model, LoraConfig(rank=2))


def test_unpacked_experts_are_pointed_out(checkpoint: Checkpoint) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint("mixtral"))
    with pytest.raises(ModelError, match=r"hetero\.load_model"):
        attach_lora(plain, LoraConfig(targets=("experts",)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"expert_rank": 0}, "expert_rank=0"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"targets": ()}, "empty"),
        ({"expert_layout": "both"}, "shared_outer, per_expert"),
        ({"dropout": 0.1}, "dropout must be 0"),
    ],
)
def test_configurations_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LoraConfig(**arguments)  # type: ignore[arg-type]


def test_a_single_target_may_be_a_string() -> None:
    assert LoraConfig(targets="attention").targets == ("attention",)


def test_layers_left_to_pytorch_carry_lora_too() -> None:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_bias=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double()
    base = _logits(model)
    state = set(model.state_dict())
    attach_lora(model, LoraConfig(rank=3, alpha=6.0, targets=("attention", "mlp")))
    assert sum(isinstance(module, LoraLinear) for module in model.modules()) == 14
    assert {name for name in model.state_dict() if "lora_" not in name} == state
    assert torch.equal(_logits(model), base)
    _nudge(model)
    layer = model.model.layers[1].mlp.up_proj
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = x @ (layer.weight + 2.0 * layer.lora.b.double() @ layer.lora.a.double()).T
    torch.testing.assert_close(layer(x), want)
    model(IDS, labels=IDS).loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in lora_parameters(model).values()
    )
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)
    with lora_disabled(model):
        assert torch.equal(_logits(model), base)
