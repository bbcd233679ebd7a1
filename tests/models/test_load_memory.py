"""Loading streams: the peak stays near the packed size, and no file stays mapped behind the model's back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, Kind, describe, save_gguf
from quantised_checkpoints import FP8_CONFIG, save_fp8
from safetensors.torch import load_file, save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hetero.models import base_hash, load_model
from hetero.models.mapped_files import release_file_pages

SCRIPT = """
import sys, torch
from hetero.models import load_model, streaming
from hetero.models.hashing import base_tensors

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
warm, path = sys.argv[1:]
load_model(warm, device="cpu")
streaming.pages.step = 4 << 20
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
model = load_model(path, device="cpu")
peak = status("VmHWM") - before
with open("/proc/self/maps") as lines:
    mapped = sum(line.strip().endswith((".safetensors", ".gguf")) for line in lines)
print(peak, sum(tensor.nbytes for _, tensor in base_tensors(model)), mapped)
"""


DENSE: list[tuple[str | int, ...]] = [
    ("attn_norm", "k"),
    ("attn_q", 512, "k"),
    ("attn_k", 128, "k"),
    ("attn_v", 128, "k"),
    ("attn_output", "k", 512),
    ("attn_q_norm", 64),
    ("attn_k_norm", 64),
    ("ffn_norm", "k"),
    ("ffn_gate_inp", "e", "k"),
]
CLEARABLE = os.access("/proc/self/clear_refs", os.W_OK)


def save_constant(config: PreTrainedConfig, model_class: type[PreTrainedModel], directory: Path) -> None:
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(directory, max_shard_size="40MB")


def measure(warm: Path, path: Path) -> tuple[int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(warm), str(path)], capture_output=True, text=True, check=True
    )
    peak, packed, mapped = map(int, done.stdout.split())
    return peak, packed, mapped


def check_growth(warm: Path, save: Callable[[int, Path], Path], directory: Path) -> None:
    """From 1 layer to 3, the peak grows by what is packed and at most a tenth more.

    A difference, because the first load of a kind also touches code and grows the interpreter's heap, by an
    amount that is the same for every model but not for every machine.
    """
    (small, some, _), (large, packed, mapped) = (
        measure(warm, save(layers, directory / f"layers{layers}")) for layers in (1, 3)
    )
    assert packed - some > 200e6
    assert large - small < 1.1 * (packed - some)
    assert mapped == 0


@pytest.mark.skipif(not CLEARABLE, reason="needs Linux's peak-memory counter")
def test_peak_memory_grows_by_the_packed_size_and_a_tenth(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def save(layers: int, directory: Path) -> Path:
        config = MixtralConfig(
            vocab_size=512,
            hidden_size=512,
            intermediate_size=4608,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        )
        save_constant(config, MixtralForCausalLM, directory)
        return directory

    check_growth(checkpoint("mixtral"), save, tmp_path)


def qwen3_moe(layers: int, **sizes: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        moe_intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts_per_tok=2,
        **sizes,
    )


def save_constant_fp8(layers: int, directory: Path) -> Path:
    config = qwen3_moe(layers, vocab_size=512, hidden_size=512, num_experts=72)
    save_constant(config, Qwen3MoeForCausalLM, directory)
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = torch.full(tensors[name].shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in tensors[name].shape], 0.01)
        save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    for name in [name for name in index["weight_map"] if ".experts." in name]:
        index["weight_map"][f"{name}_scale_inv"] = index["weight_map"][name]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    shipped = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(shipped | {"quantization_config": FP8_CONFIG}))
    return directory


@pytest.mark.skipif(not CLEARABLE, reason="needs Linux's peak-memory counter")
def test_so_it_is_for_codes(tmp_path: Path) -> None:
    check_growth(save_fp8("qwen3_moe", tmp_path)[0], save_constant_fp8, tmp_path)


def save_constant_gguf(layers: int, directory: Path) -> Path:
    e, n, k = 64, 1024, 1024
    config = qwen3_moe(layers, vocab_size=128, hidden_size=k, num_experts=e)
    path = directory.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, "qwen3moe")
    describe(writer, ARCHITECTURES["qwen3moe"], config)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float16))

    add("token_embd", 128, k)
    add("output_norm", k)
    add("output", 128, k)
    for layer in range(layers):
        for name, *shape in DENSE:
            add(f"blk.{layer}.{name}", *({"k": k, "e": e}.get(extent, extent) for extent in shape))
        for name, rows, columns in (("gate", n, k), ("up", n, k), ("down", k, n)):
            raw = np.zeros((e, rows, columns // 32 * 18), dtype=np.uint8)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", raw, raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.skipif(not CLEARABLE, reason="needs Linux's peak-memory counter")
def test_so_it_is_for_gguf(tmp_path: Path) -> None:
    check_growth(save_gguf("qwen3moe", tmp_path)[0], save_constant_gguf, tmp_path)


def test_releasing_pages_does_no_harm(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    digest = base_hash(model)
    release_file_pages()
    assert base_hash(model) == digest
