"""Adapters on disk: PEFT reads what we write, we read what PEFT writes, and our own come back to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from hetero.errors import ModelError
from hetero.models import load_model
from hetero.models.adapter import MASTERS, load_adapter, save_adapter
from hetero.models.lora import LoraConfig, detach_lora, lora_disabled, lora_factors, lora_parameters

Checkpoint = Callable[[str], Path]
FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3")
ALL = ("attention", "mlp", "experts")
TOLERANCE = 0.03
"""bf16 activations in two layers; a wrong factor shows as 0.1 or more."""

# PEFT looks for the patterns of `target_parameters` among modules only, warns, and applies them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


def _ours(directory: Path, config: LoraConfig | None = None) -> PreTrainedModel:
    model = load_model(directory, device="cpu", lora=config)
    if config is not None:
        _randomise(model)
    return model


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Factors large enough to change every logit, and not representable in bf16."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in lora_parameters(model).items():
        std = 0.3 if name.endswith("b") else 1 / math.sqrt(parameter.shape[-1])
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _plain(directory: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)


IDS = torch.randint(1, 128, (3, 17), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits.float()


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Median over tokens of the relative error: a token whose router stands at a tie may go the other way."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


CASES = [
    *((family, ALL, layout) for family in FAMILIES for layout in ("shared_outer", "per_expert")),
    ("mixtral", ("attention",), "shared_outer"),
    ("mixtral", (r".*experts\.down_proj",), "shared_outer"),
    ("mixtral", (r".*\.1\..*experts\.gate_proj", r".*\.(q|o)_proj"), "per_expert"),
    ("gpt_oss", (r".*experts\.up_proj", r".*experts\.down_proj"), "per_expert"),
    ("qwen2_moe", (r".*shared_expert\.up_proj", "lm_head"), "shared_outer"),
    ("deepseek_v3", ("mlp",), "shared_outer"),
]


@pytest.mark.parametrize(("family", "targets", "layout"), CASES)
def test_peft_computes_what_we_compute(
    family: str, targets: tuple[str, ...], layout: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = LoraConfig(rank=5, alpha=8.0, targets=targets, expert_layout=layout, expert_rank=3)
    ours = _ours(checkpoint(family), config)
    adapter = save_adapter(ours, tmp_path / "adapter")
    theirs = _plain(checkpoint(family), adapter)
    got, want, base = _logits(ours), _logits(theirs), _logits(_plain(checkpoint(family)))
    assert _distance(base, want) > 0.1, "the adapter must matter, or equality says nothing"
    assert _distance(got, want) < TOLERANCE
    written = load_file(adapter / "adapter_model.safetensors")
    loaded = {key: t for key, t in peft.get_peft_model_state_dict(theirs).items() if "lora_" in key}
    assert written.keys() == loaded.keys(), "every tensor found its place"
    assert all(torch.equal(loaded[key], written[key].float()) for key in written)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_dense_layers_left_to_pytorch_take_the_same_adapter(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    exact = _ours(checkpoint(family), LoraConfig(rank=3))
    saved = save_adapter(exact, tmp_path / "exact")
    torch_dense = load_model(checkpoint(family), device="cpu", dense="torch")
    base = _logits(torch_dense)
    load_adapter(torch_dense, saved)
    assert _distance(base, _logits(exact)) > 0.1
    assert _distance(_logits(torch_dense), _logits(exact)) < TOLERANCE
    again = save_adapter(torch_dense, tmp_path / "again")
    names = ("adapter_model.safetensors", "adapter_config.json", MASTERS)
    assert all((saved / name).read_bytes() == (again / name).read_bytes() for name in names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
def test_updates_of_the_experts_are_exactly_ours(
    family: str, layout: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ours = _ours(
        checkpoint(family), LoraConfig(rank=4, alpha=6.0, targets=("experts",), expert_layout=layout)
    )
    with torch.no_grad():
        for parameter in lora_parameters(ours).values():
            parameter.copy_(parameter.bfloat16())  # PEFT's half of the directory is bf16
    theirs = _plain(checkpoint(family), save_adapter(ours, tmp_path / "adapter"))
    for name, lora in lora_factors(ours).items():
        at = ours.get_submodule(name).layout
        outer = theirs.get_submodule(f"base_model.model.{name}")
        deltas = {w.parameter_name: w.get_delta_weight("default") for w in (outer, outer.base_layer)}
        for e in range(at.num_experts):
            pick = [t if t.ndim == 2 else t[e] for t in (lora.gate_a, lora.up_a, lora.down_b)]
            gate, up, down = (
                lora.gate_b[e] @ pick[0] * lora.scale,
                lora.up_b[e] @ pick[1] * lora.scale,
                pick[2] @ lora.down_a[e] * lora.scale,
            )
            gate_up = torch.stack([gate, up], 1).flatten(0, 1) if at.interleaved else torch.cat([gate, up])
            if at.transposed:
                gate_up, down = gate_up.T, down.T
            torch.testing.assert_close(deltas["gate_up_proj"][e], gate_up, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(deltas["down_proj"][e], down, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
def test_our_own_come_back_to_the_bit(layout: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = LoraConfig(rank=3, alpha=7.0, expert_layout=layout)
    ours = _ours(checkpoint("qwen2_moe"), config)
    first = save_adapter(ours, tmp_path / "first")
    again = _ours(checkpoint("qwen2_moe"))
    load_adapter(again, first)
    masters, restored = lora_parameters(ours), lora_parameters(again)
    assert list(masters) == list(restored)
    assert all(torch.equal(masters[name], restored[name]) for name in masters)
    assert all(
        parameter.dtype == torch.float32 and parameter.requires_grad for parameter in restored.values()
    )
    assert torch.equal(_logits(ours), _logits(again))
    with lora_disabled(again):
        second = save_adapter(again, tmp_path / "second")
    names = ("adapter_model.safetensors", "adapter_config.json", MASTERS)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_loading_into_an_adapter_keeps_its_parameters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = LoraConfig(rank=3)
    ours = _ours(checkpoint("mixtral"), config)
    saved = save_adapter(ours, tmp_path / "adapter")
    want = {name: parameter.detach().clone() for name, parameter in lora_parameters(ours).items()}
    held = list(lora_parameters(ours).values())
    logits, version = _logits(ours), ours
    with torch.no_grad():
        for parameter in held:
            parameter.add_(1.0)
    assert not torch.equal(_logits(version), logits)
    load_adapter(ours, saved)
    assert all(a is b for a, b in zip(held, lora_parameters(ours).values(), strict=True))
    assert all(torch.equal(parameter, want[name]) for name, parameter in lora_parameters(ours).items())
    assert torch.equal(_logits(ours), logits), "cached casts of the factors must follow"
    other = _ours(checkpoint("mixtral"), LoraConfig(rank=4))
    with pytest.raises(ModelError, match="detach_lora"):
        load_adapter(other, saved)
    detach_lora(other)
    load_adapter(other, saved)
    assert torch.equal(_logits(other), logits)


def _peft_adapter(directory: Path, out: Path, **config: Any) -> Any:
    """An adapter made and saved by PEFT, with random factors."""
    model = peft.get_peft_model(_plain(directory), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                std = 0.3 if "lora_B" in name else 1 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.save_pretrained(out)
    return model


FOREIGN = [
    ("mixtral", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    ("mixtral", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True}),
    (
        "qwen3_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["k_proj", "o_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.o_proj": 2},
            "alpha_pattern": {"k_proj": 20},
        },
    ),
    (
        "gpt_oss",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    (
        "mixtral",
        {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    ),
    (
        "qwen3_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
    ),
    (
        "qwen3_moe",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
]


@pytest.mark.parametrize(("family", "config"), FOREIGN)
def test_adapters_of_peft_are_loaded(
    family: str, config: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    theirs = _peft_adapter(checkpoint(family), tmp_path / "theirs", **config)
    ours = _ours(checkpoint(family))
    base = _logits(ours)
    load_adapter(ours, tmp_path / "theirs")
    want = _logits(theirs)
    assert _distance(base, want) > 0.1
    assert _distance(_logits(ours), want) < TOLERANCE
    back = _plain(checkpoint(family), save_adapter(ours, tmp_path / "ours"))
    assert _distance(_logits(back), want) < TOLERANCE


@pytest.mark.parametrize("shared", [False, True])
def test_adapters_with_one_pair_per_expert_are_loaded(
    shared: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {}
    for layer in range(2):
        common = {"w1": draw(2, 64), "w3": draw(2, 64), "w2": draw(64, 2)}
        for expert in range(4):
            for part, (outs, ins) in {"w1": (96, 64), "w3": (96, 64), "w2": (64, 96)}.items():
                key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.lora_"
                a, b = draw(2, ins), draw(outs, 2)
                if shared:
                    a, b = (a, common[part]) if part == "w2" else (common[part], b)
                tensors[f"{key}A.weight"], tensors[f"{key}B.weight"] = a.clone(), b.clone()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["w1", "w2", "w3"], task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    ours = _ours(checkpoint("mixtral"))
    load_adapter(ours, tmp_path)
    shapes = {name.rpartition(".")[2]: tuple(p.shape) for name, p in lora_parameters(ours).items()}
    assert shapes["lora_gate_b"] == (4, 96, 2)
    assert shapes["lora_gate_a"] == ((2, 64) if shared else (4, 2, 64))
    assert shapes["lora_down_b"] == ((64, 2) if shared else (4, 64, 2))
    assert _distance(_logits(ours), _logits(_plain(checkpoint("mixtral"), tmp_path))) < TOLERANCE


def test_gate_and_up_of_different_ranks_are_levelled(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ours = _ours(checkpoint("mixtral"), LoraConfig(rank=3, targets=(r".*experts\.(gate|up)_proj",)))
    tensors = {}
    for name, lora in lora_factors(ours).items():
        for expert in range(4):
            for part, p, rank in (("w1", "gate", 3), ("w3", "up", 2)):
                key = f"base_model.model.{name.replace('mlp', 'block_sparse_moe')}.{expert}.{part}.lora_"
                tensors[f"{key}A.weight"] = getattr(lora, f"{p}_a")[:rank].detach().clone()
                tensors[f"{key}B.weight"] = getattr(lora, f"{p}_b")[expert, :, :rank].detach().clone()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 32, "alpha_pattern": {"w3": 32 * 2 / 3}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = _ours(checkpoint("mixtral"))
    load_adapter(again, tmp_path)
    with torch.no_grad():
        for lora in lora_factors(ours).values():
            lora.up_b[:, :, 2] = 0
    torch.testing.assert_close(_logits(again), _logits(ours))
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"w3": 1.0}}))
    other = _ours(checkpoint("mixtral"))
    load_adapter(other, tmp_path)
    assert _distance(_logits(other), _logits(ours)) > TOLERANCE, "the scale of each projection counts"


def test_an_adapter_that_peft_changed_is_not_mistaken_for_ours(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ours = _ours(checkpoint("mixtral"), LoraConfig(rank=2, targets=("attention",)))
    adapter = save_adapter(ours, tmp_path / "adapter")
    tensors = {key: tensor * 2 for key, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    again = _ours(checkpoint("mixtral"))
    with pytest.warns(UserWarning, match="has changed"):
        load_adapter(again, adapter)
    name, master = next(iter(lora_parameters(ours).items()))
    assert torch.equal(lora_parameters(again)[name], master.bfloat16().float() * 2)


def _reversed(adapter: Path, num_experts: int) -> None:
    """Rewrite the experts' factors as PEFT stored them before 0.20: A and B exchanged, experts as ever."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if "experts" in key and key.endswith("lora_A.weight")]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        rank = a.shape[0] // num_experts
        a_per_expert = a.view(num_experts, rank, -1)
        b_per_expert = b.view(-1, rank, num_experts).permute(2, 1, 0)
        tensors[key] = b_per_expert.flatten(0, 1).contiguous()
        tensors[key.replace("lora_A", "lora_B")] = a_per_expert.permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_version": "0.18.1"}))
    (adapter / MASTERS).unlink()


@pytest.mark.parametrize("intermediate", [96, 64, 32])
def test_the_order_of_factors_before_peft_0_20_is_understood(intermediate: int, tmp_path: Path) -> None:
    """An intermediate size of 64 makes the down projection square, one of 32 the fused gate and up."""
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    ours = _ours(tmp_path / "model", LoraConfig(rank=3))
    adapter = save_adapter(ours, tmp_path / "adapter")
    _reversed(adapter, num_experts=3)
    again = _ours(tmp_path / "model")
    load_adapter(again, adapter)
    for name, master in lora_parameters(ours).items():
        assert torch.equal(lora_parameters(again)[name], master.bfloat16().float())
    detach_lora(again)
    if intermediate != 96:
        text = (adapter / "adapter_config.json").read_text().replace('"peft_version"', '"some_version"')
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(ModelError, match="peft_version"):
            load_adapter(again, adapter)


def _edited(source: Path, out: Path, **changes: Any) -> Path:
    out.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    (out / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    return out


def test_what_cannot_be_loaded_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = save_adapter(_ours(checkpoint("mixtral"), LoraConfig(rank=2)), tmp_path / "source")
    model = _ours(checkpoint("mixtral"))
    for number, (changes, message) in enumerate(
        [
            ({"use_dora": True}, "use_dora"),
            ({"bias": "all"}, "bias"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"peft_type": "IA3"}, "IA3"),
        ]
    ):
        with pytest.raises(ModelError, match=message):
            load_adapter(model, _edited(source, tmp_path / str(number), **changes))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no PEFT adapter"):
        load_adapter(model, tmp_path / "empty")
    for family, message in (("qwen3_moe", "do not fit"), ("deepseek_v3", "made for another model")):
        with pytest.raises(ModelError, match=message):
            load_adapter(_ours(checkpoint(family)), _edited(source, tmp_path / family))
    torn = _edited(source, tmp_path / "torn")
    tensors = load_file(torn / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, torn / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="only one factor"):
        load_adapter(model, torn)
    assert not lora_parameters(model), "a refused adapter leaves nothing behind"


def test_saving_replaces_an_adapter_and_nothing_else(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = _ours(checkpoint("mixtral"))
    with pytest.raises(ModelError, match="no LoRA adapter"):
        save_adapter(model, tmp_path / "adapter")
    model = _ours(checkpoint("mixtral"), LoraConfig(rank=2, targets=("attention",)))
    save_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.mul_(3)
    save_adapter(model, tmp_path / "adapter")
    again = _ours(checkpoint("mixtral"))
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(_logits(again), _logits(model))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ModelError, match="holds no adapter"):
        save_adapter(model, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_means_the_same_on_a_gpu(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Dense layers adapted on the GPU, experts in RAM; saved there, loaded on the CPU, and back."""
    on_gpu = load_model(checkpoint(family), device="cuda", lora=LoraConfig(rank=3))
    _randomise(on_gpu)
    adapter = save_adapter(on_gpu, tmp_path / "adapter")
    on_cpu = _ours(checkpoint(family))
    load_adapter(on_cpu, adapter)
    with torch.no_grad():
        got = on_gpu(IDS.cuda(), use_cache=False).logits.float().cpu()
    assert _distance(got, _logits(on_cpu)) < TOLERANCE
    again = load_model(checkpoint(family), device="cuda")
    load_adapter(again, save_adapter(on_cpu, tmp_path / "again"))
    for name, master in lora_parameters(on_gpu).items():
        restored = lora_parameters(again)[name]
        assert restored.device == master.device
        assert torch.equal(restored, master)
