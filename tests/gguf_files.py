"""Tiny random Mixture-of-Experts models as GGUF files, each with a plain checkpoint of the decoded weights.

Names come from the table of the `gguf` package, which is also what llama.cpp's converter takes them from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from architectures import save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from hetero.experts.kquants import KQUANT_BLOCKS

Kind = gguf.GGMLQuantizationType
TOKENS = [*"abc", "ab", *(f"t{i}" for i in range(4, 128))]


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as GGUF stores Q and K: entry j of the first half of a head beside entry j of the second half."""
    out = np.empty_like(weight)
    size = weight.shape[0] // num_heads
    for head in range(num_heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = weight[head * size + j]
            out[head * size + 2 * j + 1] = weight[head * size + size // 2 + j]
    return out


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF and the tiny model of `architectures.ARCHITECTURES` that it is written from.

    Attributes:
        sizes: options of that model that differ, so that rows are whole blocks.
        describe: writes what is peculiar to it.
        rotated: q and k are written in `permuted` order.
    """

    gguf_name: str
    model: str
    sizes: Mapping[str, Any]
    describe: Callable[[gguf.GGUFWriter, Any], None]
    rotated: bool = False


def _mixtral(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)


def _qwen3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_key_length(config.head_dim)


def _qwen2(writer: gguf.GGUFWriter, config: Any) -> None:
    _qwen3(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _olmoe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_experts)


MOE = {"moe_intermediate_size": 96}
ARCHITECTURES = {
    "mixtral": Architecture("llama", "mixtral", {}, _mixtral, rotated=True),
    "qwen3moe": Architecture("qwen3moe", "qwen3_moe", MOE, _qwen3),
    "qwen2moe": Architecture("qwen2moe", "qwen2_moe", {**MOE, "norm_topk_prob": False}, _qwen2),
    "olmoe": Architecture("olmoe", "olmoe", {"norm_topk_prob": False}, _olmoe),
}
Q4 = {"gate": Kind.Q4_0, "up": Kind.Q4_0, "down": Kind.Q4_1}
"""What llama.cpp makes of a layer when it is asked for Q4_0."""


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks of `kind` that hold about `values`."""
    return np.asarray(gguf.quants.quantize(values, kind))


def random_blocks(kind: str, *shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    """Blocks [.., bytes of a row] of a K-quant, every byte random but the halves, which are about `size`
    times 1e-6 to 1e-1: the package cannot quantise to these types itself."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape, KQUANT_BLOCKS[kind]), dtype=np.uint8)
    for at in (208,) if kind == "q6_k" else (0, 2):
        values = rng.normal(size=shape) * size * 10.0 ** rng.integers(-6, 0, shape)
        raw[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def save_gguf(
    name: str,
    directory: Path,
    kinds: Mapping[str, Kind] = Q4,
    *,
    quantise: Callable[[np.ndarray, Kind], np.ndarray] = quantised,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    **sizes: Any,
) -> tuple[Path, Path]:
    """(a GGUF file whose experts are of `kinds`, the plain checkpoint of its weights)."""
    row = ARCHITECTURES[name]
    plain = save_tiny(row.model, directory / "plain", **{**row.sizes, **sizes})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, row.gguf_name)
    describe(writer, row, model.config)
    if edit is not None:
        edit(writer)
    architecture = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == row.gguf_name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if ".experts." in key:
            _add_experts(writer, key, tensor, kinds, quantise)
            continue
        new = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert new is not None, key
        values = tensor.float().numpy()
        if row.rotated and key.endswith(("q_proj.weight", "k_proj.weight")):
            config = model.config
            values = permuted(
                values, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            )
        if key.endswith("shared_expert_gate.weight"):
            values = values[0]
        if values.ndim == 1:
            writer.add_tensor(new, values)
        else:
            writer.add_tensor(new, quantised(values, Kind.BF16), raw_dtype=Kind.BF16)
    model.save_pretrained(plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, plain


def describe(writer: gguf.GGUFWriter, row: Architecture, config: Any) -> None:
    """Write the metadata of a model."""
    row.describe(writer, config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS[: config.vocab_size])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _add_experts(
    writer: gguf.GGUFWriter,
    key: str,
    tensor: torch.Tensor,
    kinds: Mapping[str, Kind],
    quantise: Callable[[np.ndarray, Kind], np.ndarray],
) -> None:
    """Write gate, up or down of all experts of a layer; `tensor` becomes what the file then holds."""
    layer = key.split(".")[2]
    parts = (
        {"down": tensor}
        if key.endswith("down_proj")
        else dict(zip(("gate", "up"), tensor.chunk(2, 1), strict=True))
    )
    for part, weight in parts.items():
        kind = kinds[part]
        raw = quantise(weight.float().numpy(), kind)
        weight.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind), dtype=np.float32)))
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", raw, raw_dtype=kind)
