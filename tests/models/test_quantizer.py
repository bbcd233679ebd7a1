"""`from_pretrained` with `HeteroConfig`: streams, generates, trains with PEFT, saves plain checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero.errors import ModelError
from hetero.experts import ExpertStore
from hetero.formats import packing
from hetero.kernels.cpu import pack
from hetero.models import HeteroConfig, HeteroQuantizer, load_model
from hetero.models.experts import HeteroExperts, read_layout

Checkpoint = Callable[[str], Path]
PROMPT = torch.tensor([[5, 9, 2, 77, 31, 8], [64, 3, 3, 90, 17, 12]])


def plain(path: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def packed(path: Path, **options: object) -> PreTrainedModel:
    config = HeteroConfig(experts="bf16")
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **options)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_logits_and_generate_agree_with_the_plain_model(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint(name)
    exact = plain(path, torch.float32)
    model = packed(path, dtype=torch.float32, attn_implementation="eager")
    experts = [m for m in model.modules() if isinstance(m, HeteroExperts)]
    assert experts
    assert all(m.store is not None and not list(m.parameters()) for m in experts)
    with torch.no_grad():
        torch.testing.assert_close(model(PROMPT).logits, exact(PROMPT).logits, rtol=0.02, atol=0.02)
    got = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert got.shape == (2, 10)


def test_every_layer_is_packed_and_nothing_else_is_touched(checkpoint: Checkpoint) -> None:
    model = packed(checkpoint("mixtral"), dtype=torch.bfloat16)
    original = plain(checkpoint("mixtral"))
    assert model.is_quantized
    assert model.config._experts_implementation == "hetero"
    for layer, twin in zip(model.model.layers, original.model.layers, strict=True):
        gate_up, down = layer.mlp.experts.store.dequantize()
        assert torch.equal(gate_up, twin.mlp.experts.gate_up_proj)
        assert torch.equal(down, twin.mlp.experts.down_proj)
        assert type(layer.self_attn.q_proj) is nn.Linear
        assert torch.equal(layer.mlp.gate.weight, twin.mlp.gate.weight)


def test_peft_trains_the_attention_around_packed_experts(checkpoint: Checkpoint) -> None:
    model = get_peft_model(
        packed(checkpoint("qwen3_moe"), dtype=torch.float32), LoraConfig(target_modules=["q_proj"])
    )
    loss = model(input_ids=PROMPT, labels=PROMPT).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads
    assert all(".q_proj.lora_" in name for name in grads)
    first_layer = [g for name, g in grads.items() if "layers.0." in name and "lora_B" in name]
    assert all(float(g.abs().sum()) > 0 for g in first_layer)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama"])
def test_save_pretrained_writes_the_checkpoint_that_was_loaded(
    checkpoint: Checkpoint, name: str, tmp_path: Path
) -> None:
    config = HeteroConfig(experts="bf16", dense="bf16")
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(name), quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    want = plain(checkpoint(name)).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # its config.json asks for hetero again
    assert isinstance(model.hf_quantizer, HeteroQuantizer)
    model.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_text((checkpoint(name) / "config.json").read_text())
    got = plain(tmp_path / "again").state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (".experts.", r"lacks gate_up_proj, down_proj of model\.layers\.0\.mlp\.experts"),
        (
            "layers.1.block_sparse_moe.experts.2.w2",
            r"layers\.1\.mlp\.experts\.down_proj.* expected 4 of each",
        ),
    ],
)
def test_a_checkpoint_with_missing_experts_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, lost: str, message: str
) -> None:
    copytree(checkpoint("mixtral"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if lost not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        packed(tmp_path)


class _Odd(nn.Module):
    has_gate, has_bias, has_post_expert_norm, is_transposed, is_concatenated = True, False, False, False, True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2, 8, 4))
        self.down_proj = nn.Parameter(torch.empty(2, 4, 4))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.cos(gate) * up


def test_experts_that_cannot_be_expressed_are_named() -> None:
    odd = _Odd()
    with pytest.raises(ModelError, match=r"layers\.3\.experts \(_Odd\) gates its experts in a way"):
        read_layout("layers.3.experts", odd)
    odd.has_post_expert_norm = True
    with pytest.raises(ModelError, match="normalises the output"):
        read_layout("layers.3.experts", odd)
    odd.has_gate = False
    with pytest.raises(ModelError, match="without a gate"):
        read_layout("layers.3.experts", odd)


def test_unpacked_experts_refuse_the_hetero_implementation(checkpoint: Checkpoint) -> None:
    model = plain(checkpoint("mixtral"))
    model.set_experts_implementation("hetero")
    with pytest.raises(ModelError, match="holds no packed experts"):
        model(PROMPT)


def test_options_of_the_scales_reach_experts_and_dense_layers(checkpoint: Checkpoint) -> None:
    options = {"group_size": 64, "symmetric": False, "scale_search": "mse"}
    model = load_model(checkpoint("qwen3_moe"), device="cpu", experts="int4", dense="int8", **options)
    assert model.hetero.experts == "int4_asym"
    original = plain(checkpoint("qwen3_moe"))
    for layer, twin in zip(model.model.layers, original.model.layers, strict=True):
        experts = twin.mlp.experts
        want = ExpertStore.from_tensors(experts.gate_up_proj, experts.down_proj, "int4", **options)
        for part in ("gate_up", "down"):
            got = getattr(layer.mlp.experts.store, part)
            assert got.packing == packing("int4", 64, False, "mse")
            assert torch.equal(got.data, getattr(want, part).data)
        dense = layer.self_attn.o_proj.packed
        best = pack(twin.self_attn.o_proj.weight, packing=packing("int8", scale_search="mse"))
        assert torch.equal(dense.data, best.data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 64}, "group_size=64 means nothing without a format"),
        ({"symmetric": False}, "symmetric=False means nothing without a format"),
        ({"experts": "bf16", "group_size": 64}, "has no scales, so group_size=64 means nothing"),
        ({"experts": "int4", "group_size": 48}, "group_size=48 is not one that 'int4' has: 32, 64, 128"),
        ({"experts": "nf4", "symmetric": False}, "'nf4' has no asymmetric form"),
        ({"experts": "int4", "scale_search": "best"}, "scale_search='best' is not one of max, mse"),
        ({"scale_search": "mse"}, "scale_search='mse' means nothing where no format has scales"),
        ({"dense": "q4_0"}, "'q4_0' takes the codes of a GGUF file"),
        ({"dense": "auto"}, "'auto' is not a weight format"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        HeteroConfig(**options)  # type: ignore[arg-type]


def test_what_is_asked_for_wins_over_what_was_saved(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load_model(checkpoint("mixtral"), device="cpu", experts="int4").save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu", experts="int8").hetero.experts == "int8"


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ModelError, match="'int3' is not a weight format"):
        HeteroConfig(experts="int3")
