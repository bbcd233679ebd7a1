"""Mixture-of-Experts models from GGUF files: the experts' blocks are kept, the rest is decoded."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, Kind, quantised, random_blocks, save_gguf
from quantised_checkpoints import assert_same_weights
from transformers import AutoModelForCausalLM

from hetero.errors import ModelError
from hetero.models import load_model
from hetero.recipe.recipe import Recipe
from hetero.run.opening import opened
from hetero.run.plan import memory_plan


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_model_is_that_of_the_file_s_values(name: str, tmp_path: Path) -> None:
    file, plain = save_gguf(name, tmp_path)
    model = load_model(file, device="cpu")
    assert model.hetero.experts == "q4_0, q4_1"
    want = load_model(plain, device="cpu")
    assert type(model) is type(want)
    assert_same_weights(model, want)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    prompt = torch.tensor([[5, 9, 2, 77, 31, 8]])
    with torch.no_grad():
        got, exact = model(prompt).logits.float(), reference(prompt).logits
    errors = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(errors.median()) < 0.02
    ignored = {"_name_or_path", "dtype", "quantization_config", "architectures", "initializer_range"}
    for key, value in want.config.to_dict().items():
        assert key in ignored or model.config.to_dict().get(key, value) == value, key


@pytest.mark.parametrize(
    ("kind", "format"), [(Kind.Q8_0, "q8_0"), (Kind.Q4_0, "q4_0"), (Kind.F16, "bf16"), (Kind.BF16, "bf16")]
)
def test_every_kind_of_block_keeps_its_values(kind: Kind, format: str, tmp_path: Path) -> None:
    file, plain = save_gguf("qwen3moe", tmp_path, dict.fromkeys(("gate", "up", "down"), kind))
    model = load_model(file, device="cpu")
    assert model.hetero.experts == format
    assert_same_weights(model, load_model(plain, device="cpu"))


@pytest.mark.parametrize(
    ("kinds", "format"),
    [
        ({"gate": Kind.Q4_K, "up": Kind.Q4_K, "down": Kind.Q6_K}, "q4_k, q6_k"),  # as in a file of Q4_K_M
        ({"gate": Kind.Q5_K, "up": Kind.Q5_K, "down": Kind.Q8_0}, "q5_k, q8_0"),
    ],
)
def test_k_quants_keep_their_values(kinds: dict[str, Kind], format: str, tmp_path: Path) -> None:
    def quantise(values: np.ndarray, kind: Kind) -> np.ndarray:
        if kind == Kind.Q8_0:
            return quantised(values, kind)
        e, n, k = values.shape
        return random_blocks(kind.name.lower(), e, n, k // 256, size=1e-3)

    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    file, plain = save_gguf("qwen3moe", tmp_path, kinds, quantise=quantise, **sizes)
    model = load_model(file, device="cpu")
    assert model.hetero.experts == format
    want = load_model(plain, device="cpu")
    assert_same_weights(model, want)
    prompt = torch.tensor([[5, 9, 2, 77, 31, 8]])
    with torch.no_grad():
        got, exact = model(prompt).logits, want(prompt).logits
    assert float((got - exact).norm() / exact.norm()) < 0.01


def test_another_format_packs_the_decoded_weights(tmp_path: Path) -> None:
    file, plain = save_gguf("olmoe", tmp_path)
    model = load_model(file, device="cpu", experts="int8")
    assert model.hetero.experts == "int8"
    assert_same_weights(model, load_model(plain, device="cpu", experts="int8"))


def test_blocks_that_no_format_holds_need_a_format(tmp_path: Path) -> None:
    file, plain = save_gguf("qwen3moe", tmp_path, dict.fromkeys(("gate", "up", "down"), Kind.Q5_0))
    with pytest.raises(ModelError, match="holds experts as Q5_0, which no format here keeps"):
        load_model(file, device="cpu")
    model = load_model(file, device="cpu", experts="bf16")
    assert_same_weights(model, load_model(plain, device="cpu"))


def test_a_directory_with_one_file_is_that_model(tmp_path: Path) -> None:
    file, plain = save_gguf("mixtral", tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(file, folder / "tiny.gguf")
    assert_same_weights(load_model(folder, device="cpu"), load_model(plain, device="cpu"))
    shutil.copy(file, folder / "other.gguf")
    with pytest.raises(ModelError, match=r"several GGUF models: other\.gguf, tiny\.gguf"):
        load_model(folder, device="cpu")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    file, plain = save_gguf("qwen3moe", tmp_path)
    reader = gguf.GGUFReader(file)
    _split(file, reader)
    model = load_model(tmp_path / "split", device="cpu")
    assert_same_weights(model, load_model(plain, device="cpu"))
    (tmp_path / "split" / "tiny-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"no GGUF file at .*tiny-00002-of-00002\.gguf"):
        load_model(tmp_path / "split" / "tiny-00001-of-00002.gguf", device="cpu")


def _split(file: Path, reader: gguf.GGUFReader) -> None:
    """Metadata and half of the tensors in the first file, the others in the second."""
    folder = file.parent / "split"
    folder.mkdir()
    for part in (1, 2):
        writer = gguf.GGUFWriter(folder / f"tiny-0000{part}-of-00002.gguf", "qwen3moe")
        for field in reader.fields.values() if part == 1 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY and len(field.types) > 1 else None
                value = field.contents()
                if value != []:
                    writer.add_key_value(field.name, value, kind, sub_type=sub)
        for tensor in reader.tensors[part - 1 :: 2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_a_run_opens_it_and_plans_its_memory(tmp_path: Path) -> None:
    file, _ = save_gguf("qwen3moe", tmp_path)
    recipe = Recipe.from_dict(
        {
            "model": {"path": str(file), "device": "cpu"},
            "data": {"train": "arithmetic", "plain": True},
            "rl": {"rewards": ["last_number"]},
            "train": {"steps": 1},
        }
    )
    with opened(recipe.model) as loaded:
        assert loaded.tokenizer.convert_ids_to_tokens([5, 127]) == ["t5", "t127"]
        assert loaded.tokenizer.eos_token_id == 2
        stores = [layer.mlp.experts.store for layer in loaded.model.model.layers]
        packed = sum(store.nbytes for store in stores)
    assert 0.9 * packed < memory_plan(recipe).parts["experts"] <= packed


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    file, _ = save_gguf("qwen3moe", tmp_path, edit=scaled)
    with pytest.raises(ModelError, match="scales its rotary positions"):
        load_model(file, device="cpu")
    other = tmp_path / "other"
    other.mkdir()

    def old(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate.0.weight", torch.zeros(32, 32).numpy())

    file, _ = save_gguf("mixtral", other, edit=old)
    with pytest.raises(ModelError, match=r"has a tensor 'blk\.0\.ffn_gate\.0\.weight'"):
        load_model(file, device="cpu")
