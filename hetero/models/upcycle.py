"""Sparse upcycling: turn a dense Llama-type model into a Mixture of Experts that computes the same function.

Every expert starts as a copy of the dense feed-forward network and the weights of a token's experts sum to 1,
so the mixture equals the dense model up to rounding, whatever the router says (arXiv 2212.05055).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig, PreTrainedConfig, Qwen2MoeConfig

from hetero.errors import CapacityError, ModelError
from hetero.models.seeding import named_generator
from hetero.models.shards import ShardWriter
from hetero.models.source import TensorSource, open_source
from hetero.models.staging import staged_directory

_MLP = re.compile(r"(model\.layers\.\d+\.)mlp\.(gate|up|down)_proj\.weight")
_COPIED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# A Qwen2-MoE layer always has a shared expert; ours adds nothing (zero down projection), so it is kept small.
_SHARED_SIZE = 64


@dataclass(frozen=True)
class _Architecture:
    dense: tuple[str, ...]
    config: Callable[[PreTrainedConfig, int, int], PreTrainedConfig]
    expert: str  # name of one expert's matrix, given layer prefix, expert id and projection
    router: str
    projections: dict[str, str]  # gate | up | down -> the name of that matrix in this architecture


def _mixtral(dense: PreTrainedConfig, num_experts: int, top_k: int) -> PreTrainedConfig:
    return MixtralConfig(
        **{name: getattr(dense, name) for name in _COPIED},
        head_dim=getattr(dense, "head_dim", None),
        intermediate_size=dense.intermediate_size,
        sliding_window=getattr(dense, "sliding_window", None),
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        architectures=["MixtralForCausalLM"],
    )


def _qwen2_moe(dense: PreTrainedConfig, num_experts: int, top_k: int) -> PreTrainedConfig:
    if getattr(dense, "head_dim", None) not in (None, dense.hidden_size // dense.num_attention_heads):
        raise ModelError("Qwen2-MoE has no head_dim of its own; use architecture='mixtral' for this model")
    if getattr(dense, "sliding_window", None):
        raise ModelError("the dense model attends through a sliding window; use architecture='mixtral'")
    return Qwen2MoeConfig(
        **{name: getattr(dense, name) for name in _COPIED},
        intermediate_size=dense.intermediate_size,
        moe_intermediate_size=dense.intermediate_size,
        shared_expert_intermediate_size=_SHARED_SIZE,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        qkv_bias=dense.model_type == "qwen2",
        architectures=["Qwen2MoeForCausalLM"],
    )


ARCHITECTURES: dict[str, _Architecture] = {
    "mixtral": _Architecture(
        ("llama", "mistral"),
        _mixtral,
        "{layer}block_sparse_moe.experts.{expert}.{projection}.weight",
        "{layer}block_sparse_moe.gate.weight",
        {"gate": "w1", "up": "w3", "down": "w2"},
    ),
    "qwen2_moe": _Architecture(
        ("llama", "mistral", "qwen2"),
        _qwen2_moe,
        "{layer}mlp.experts.{expert}.{projection}.weight",
        "{layer}mlp.gate.weight",
        {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    ),
}


def upcycle(
    source: str | Path,
    out_dir: str | Path,
    *,
    experts: int = 8,
    top_k: int = 2,
    architecture: str = "mixtral",
    router_std: float = 0.02,
    expert_noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a Mixture-of-Experts checkpoint that computes what the dense model `source` computes.

    Args:
        source: a Transformers directory or Hub id (Llama, Mistral, Qwen2), or a Llama-type `.gguf` file.
        out_dir: where the checkpoint goes; must not exist or be empty. It appears complete or not at all.
        experts, top_k: experts per layer, and how many of them serve one token.
        architecture: "mixtral" or "qwen2_moe".
        router_std: standard deviation of the random router. It decides who is chosen, not what comes out.
        expert_noise: Gaussian noise on every expert, as a share of the matrix's own standard deviation. 0
            keeps the function unchanged; a little of it (0.01) lets the router tell experts apart at once.
        seed: of router and noise.
        dtype: of the written tensors.

    Returns:
        `out_dir`.

    Raises:
        ModelError: the architecture cannot carry the source, or the numbers make no sense.
        CapacityError: the disk has not enough room.
    """
    chosen = _check(experts, top_k, architecture, router_std, expert_noise)
    dense = open_source(source)
    if dense.config.model_type not in chosen.dense:
        raise ModelError(
            f"{source} is a {dense.config.model_type!r} model; architecture={architecture!r} can be made "
            f"from {', '.join(chosen.dense)}"
        )
    if getattr(dense.config, "attention_bias", False) or getattr(dense.config, "mlp_bias", False):
        raise ModelError(f"{source} has biases in its linear layers, which {architecture} has no place for")
    config = chosen.config(dense.config, experts, top_k)
    config.dtype = dtype
    out_dir = Path(out_dir)
    with staged_directory(out_dir) as staging:
        _require_space(staging, dense, experts, dtype)
        writer = ShardWriter(staging)
        for name in dense.names():
            for new_name, tensor in _convert(name, dense.tensor(name), chosen, experts, expert_noise, seed):
                writer.add(new_name, tensor.to(dtype))
        for layer in range(config.num_hidden_layers):
            for new_name, tensor in _additions(layer, config, chosen, experts, router_std, seed):
                writer.add(new_name, tensor.to(dtype))
        writer.finish()
        config.save_pretrained(staging)
        dense.save_tokenizer(staging)
        (staging / "README.md").write_text(_model_card(dense, experts, top_k, architecture, expert_noise))
    return out_dir


def _check(
    experts: int, top_k: int, architecture: str, router_std: float, expert_noise: float
) -> _Architecture:
    if architecture not in ARCHITECTURES:
        raise ModelError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    if not 1 <= top_k <= experts:
        raise ModelError(
            f"top_k={top_k} experts per token out of experts={experts}: need 1 <= top_k <= experts"
        )
    if router_std < 0 or expert_noise < 0:
        raise ModelError(f"router_std={router_std} and expert_noise={expert_noise} must not be negative")
    return ARCHITECTURES[architecture]


def _convert(
    name: str, tensor: Tensor, chosen: _Architecture, experts: int, noise: float, seed: int
) -> Iterator[tuple[str, Tensor]]:
    match = _MLP.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    layer, projection = match.group(1), chosen.projections[match.group(2)]
    for expert in range(experts):
        new_name = chosen.expert.format(layer=layer, expert=expert, projection=projection)
        copy = tensor.clone()
        if noise:
            # The spread is taken and added in fp32: bf16 would round small noise away unevenly.
            values = tensor.float()
            random = torch.randn(tensor.shape, generator=named_generator(seed, new_name))
            copy = values + noise * values.std() * random
        yield new_name, copy


def _additions(
    layer: int, config: PreTrainedConfig, chosen: _Architecture, experts: int, router_std: float, seed: int
) -> Iterator[tuple[str, Tensor]]:
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    name = chosen.router.format(layer=prefix)
    yield name, torch.randn(experts, hidden, generator=named_generator(seed, name)) * router_std
    if config.model_type != "qwen2_moe":
        return
    for projection, shape in (("gate", (_SHARED_SIZE, hidden)), ("up", (_SHARED_SIZE, hidden))):
        name = f"{prefix}mlp.shared_expert.{projection}_proj.weight"
        yield name, torch.randn(shape, generator=named_generator(seed, name)) * config.initializer_range
    yield f"{prefix}mlp.shared_expert.down_proj.weight", torch.zeros(hidden, _SHARED_SIZE)
    yield f"{prefix}mlp.shared_expert_gate.weight", torch.zeros(1, hidden)


def _require_space(directory: Path, dense: TensorSource, experts: int, dtype: torch.dtype) -> None:
    size = _num_parameters(dense.config, experts) * dtype.itemsize
    free = shutil.disk_usage(directory).free
    if free < size:
        raise CapacityError(
            f"the checkpoint needs {size / 1e9:.1f} GB but {directory.parent} has {free / 1e9:.1f} GB free; "
            "write it elsewhere or use fewer experts"
        )


def _num_parameters(config: Any, experts: int) -> int:
    per_layer = 3 * config.hidden_size * config.intermediate_size * experts + 4 * config.hidden_size**2
    return config.num_hidden_layers * per_layer + 2 * config.vocab_size * config.hidden_size


def _model_card(dense: TensorSource, experts: int, top_k: int, architecture: str, noise: float) -> str:
    header = f"---\nlicense: {dense.license}\n---\n" if dense.license else ""
    changed = f", plus Gaussian noise of {noise} standard deviations" if noise else ""
    return (
        f"{header}# {dense.origin}, upcycled\n\n"
        f"Made by `hetero upcycle` from {dense.origin}: {architecture}, {experts} experts of which {top_k} "
        f"serve a token. Every expert is a copy of the dense feed-forward network{changed}; the router is "
        "random. The weights stay under the licence of the original.\n"
    )
