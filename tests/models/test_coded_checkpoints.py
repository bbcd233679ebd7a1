"""Checkpoints in fp8 and mxfp4 as they ship: the codes are kept, the model is that of the decoded weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from quantised_checkpoints import assert_same_weights, save_fp8, save_mxfp4
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

from hetero.errors import ModelError
from hetero.models import load_model
from hetero.models.dense import save_dense
from hetero.models.experts import HeteroExperts

Saver = Callable[..., tuple[Path, Path]]

# Partial blocks in both directions, in gate and up each on its own and in the dense linears.
CASES: dict[str, tuple[Saver, str, str, dict[str, Any]]] = {
    "qwen3_moe": (save_fp8, "qwen3_moe", "fp8", {"hidden_size": 192, "moe_intermediate_size": 160}),
    "deepseek_v3": (save_fp8, "deepseek_v3", "fp8", {"hidden_size": 160, "moe_intermediate_size": 136}),
    "gpt_oss": (save_mxfp4, "gpt_oss", "mxfp4", {"hidden_size": 96, "intermediate_size": 64}),
}


@pytest.fixture(scope="module", params=list(CASES))
def shipped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    save, name, format, sizes = CASES[request.param]
    return *save(name, tmp_path_factory.mktemp(name), **sizes), format


def stores(model: PreTrainedModel) -> list[Any]:
    return [module.store for module in model.modules() if isinstance(module, HeteroExperts)]


def test_the_codes_are_kept_and_the_model_is_that_of_the_decoded_weights(
    shipped: tuple[Path, Path, str],
) -> None:
    coded, plain, format = shipped
    model = load_model(coded, device="cpu")
    assert model.hetero.experts == format
    assert all(store.format == format for store in stores(model))
    want = load_model(plain, device="cpu")
    assert want.hetero.experts == "bf16"
    assert_same_weights(model, want)
    reference = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    prompt = torch.tensor([[5, 9, 2, 77, 31, 8]])
    with torch.no_grad():
        got, exact = model(prompt).logits.float(), reference(prompt).logits
    errors = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(errors.median()) < 0.02  # of a token or two the router may choose otherwise in fp32


@pytest.mark.parametrize("experts", ["bf16", "int4"])
def test_another_format_packs_the_decoded_weights(shipped: tuple[Path, Path, str], experts: str) -> None:
    coded, plain, _ = shipped
    model = load_model(coded, device="cpu", experts=experts)
    assert model.hetero.experts == experts
    assert_same_weights(model, load_model(plain, device="cpu", experts=experts))


def test_what_is_saved_is_the_plain_checkpoint(shipped: tuple[Path, Path, str], tmp_path: Path) -> None:
    coded, plain, _ = shipped
    load_model(coded, device="cpu").save_pretrained(tmp_path)
    got, want = load_file(tmp_path / "model.safetensors"), load_file(plain / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_dense_parts_left_to_pytorch_are_decoded(shipped: tuple[Path, Path, str]) -> None:
    coded, plain, format = shipped
    model = load_model(coded, device="cpu", dense="torch")
    assert model.hetero.experts == format
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert_same_weights(model, load_model(plain, device="cpu", dense="torch"))


def test_transformers_decodes_fp8_to_the_same_weights(tmp_path: Path) -> None:
    # Transformers refuses blocks that are cut off, so everything is a multiple of 128 here.
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 32}
    coded, _ = save_fp8("qwen3_moe", tmp_path, num_key_value_heads=4, **sizes)
    theirs = AutoModelForCausalLM.from_pretrained(coded, dtype=torch.bfloat16).state_dict()
    ours = load_model(coded, device="cpu")
    for layer, module in enumerate(ours.model.layers):
        gate_up, down = module.mlp.experts.store.dequantize()
        assert torch.equal(gate_up, theirs[f"model.layers.{layer}.mlp.experts.gate_up_proj"])
        assert torch.equal(down, theirs[f"model.layers.{layer}.mlp.experts.down_proj"])
        query = module.self_attn.q_proj.packed.unpack()
        assert torch.equal(query, theirs[f"model.layers.{layer}.self_attn.q_proj.weight"])


def test_transformers_decodes_mxfp4_to_the_same_weights(tmp_path: Path) -> None:
    coded, _ = save_mxfp4("gpt_oss", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        coded, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    experts = load_model(coded, device="cpu").model.layers[1].mlp.experts
    ours = experts.layout.unpack(experts.store)
    assert len(ours) == 4
    for name, tensor in ours.items():
        assert torch.equal(tensor.bfloat16(), theirs[f"model.layers.1.mlp.experts.{name}"]), name


@pytest.mark.parametrize("block", [None, [64, 256]])
def test_other_blocks_of_fp8(tmp_path: Path, block: list[int] | None) -> None:
    coded, plain = save_fp8("qwen3_moe", tmp_path, hidden_size=256, moe_intermediate_size=128)
    tensors, decoded = load_file(coded / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        n, k = tensors[weight].shape
        rows, columns = block or (n, k)
        scales = torch.rand(-(-n // rows), -(-k // columns)) * 1e-3 + 1e-4
        full = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
        decoded[weight] = (tensors[weight].float() * full).bfloat16()
        tensors[name] = scales if block else scales.view(())
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (coded / "config.json").write_text(json.dumps(config))
    model = load_model(coded, device="cpu")
    assert model.hetero.experts == "fp8"
    assert_same_weights(model, load_model(plain, device="cpu"))


def edited(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_damaged_and_unknown_checkpoints_are_refused(tmp_path: Path) -> None:
    coded, _ = save_fp8("qwen3_moe", tmp_path)
    gate = "model.layers.1.mlp.experts.2.gate_proj.weight"
    lost = edited(coded, tmp_path / "lost", lambda tensors: tensors.pop(f"{gate}_scale_inv"))
    with pytest.raises(ModelError, match=r"experts\.2\.gate_proj\.weight as torch\.float8_e4m3fn without"):
        load_model(lost, device="cpu")

    def plain_gate(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{gate}_scale_inv")
        tensors[gate] = tensors[gate].bfloat16()

    mixed = edited(coded, tmp_path / "mixed", plain_gate)
    with pytest.raises(ValueError, match="come as fp8 and as bf16; name the format"):
        load_model(mixed, device="cpu")
    assert load_model(mixed, device="cpu", experts="int8").hetero.experts == "int8"
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantized with 'awq'"):
        load_model(coded, device="cpu")


def test_a_dense_fp8_checkpoint_converts_to_bf16(tmp_path: Path) -> None:
    coded, plain = save_fp8("llama", tmp_path)
    save_dense(coded, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    got, want = (load_file(path / "model.safetensors") for path in (tmp_path / "out", plain))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert got.keys() == want.keys()
