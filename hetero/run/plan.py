"""How much memory a run will take, from the model's configuration alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hetero.engine.params import parse_bytes
from hetero.errors import ModelError
from hetero.formats import AUTO, BF16, Packing, packing
from hetero.kernels.batch import KV_BLOCK
from hetero.models.builtin_config import builtin_config
from hetero.models.codings import coding_of
from hetero.models.experts import HeteroExperts, replace_experts
from hetero.models.gguf import GgufSource
from hetero.models.lora_config import GROUPS
from hetero.models.lora_targets import find_sites
from hetero.models.quickstart import BUILTIN_MODELS, resolve_model
from hetero.models.source import quantization_of
from hetero.recipe.recipe import Recipe
from hetero.recipe.sections.model import LoraSection, ModelSection

PANEL = 32
"""Packed weights are padded to whole panels in both directions."""
MASTER, MOMENTS, GRADIENT, COPIES = 4, 8, 4, 2 * 2
"""Bytes per adapter parameter: fp32 master, two fp32 moments, fp32 gradient, bf16 copy plain and packed."""


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose, and what they are made of.

    Attributes:
        parts: purpose -> bytes.
        num_weights, num_expert_weights, num_adapter: counts of parameters.
        kv_tokens: tokens that the KV cache holds.
    """

    parts: dict[str, int]
    num_weights: int
    num_expert_weights: int
    num_adapter: int
    kv_tokens: int

    @property
    def total(self) -> int:
        """All bytes together."""
        return sum(self.parts.values())


def memory_plan(recipe: Recipe) -> Plan:
    """Predict the memory of a run. Raises ModelError when the model's configuration cannot be had or used."""
    source = _gguf(recipe.model.path)
    config = model_config(recipe.model.path) if source is None else source.config
    how = _expert_packing(recipe.model, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_weights = sum(p.numel() for p in model.parameters())
    replace_experts(model, how)
    experts = [module for module in model.modules() if isinstance(module, HeteroExperts)]
    text = config.get_text_config(decoder=True)
    num_adapter = adapter_size(model, recipe.lora)
    kv = parse_bytes(recipe.engine.kv_memory)
    expert_bytes = sum(_expert_bytes(module, how) for module in experts)
    if source is not None and recipe.model.experts == AUTO:
        expert_bytes = source.expert_bytes()
    parts = {
        "experts": expert_bytes,
        "other weights": _other_bytes(model, recipe.model.dense),
        "KV cache": kv,
        "adapter": num_adapter * (MASTER + COPIES),
        "older adapter versions": num_adapter * COPIES * recipe.rl.max_staleness,
        "optimizer": num_adapter * (MOMENTS + GRADIENT),
        "activations": _activations(text, recipe),
    }
    if recipe.engine.kv_ram is not None:
        parts["KV blocks in RAM"] = parse_bytes(recipe.engine.kv_ram)
    return Plan(
        parts=parts,
        num_weights=num_weights,
        num_expert_weights=sum(p.numel() for module in experts for p in module.parameters()),
        num_adapter=num_adapter,
        kv_tokens=kv // kv_bytes_per_token(text) // KV_BLOCK * KV_BLOCK,
    )


def model_config(path: str) -> Any:
    """The Transformers configuration of a model; of built-in models also before they are built."""
    known = builtin_config(path)
    if known is not None:
        return known
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The configuration of {path!r} cannot be had: no such directory (looked in {Path.cwd()}), and "
            f"the Hub does not give it ({str(error).splitlines()[0]}). A directory with the model's "
            "config.json is enough."
        ) from error


def _gguf(path: str) -> GgufSource | None:
    """The file when `path` leads to a GGUF model."""
    path = path if path in BUILTIN_MODELS else resolve_model(path)
    return GgufSource(path) if path.endswith(".gguf") else None


def adapter_size(model: nn.Module, lora: LoraSection) -> int:
    """Parameters of the adapter that `lora` asks for. Raises ModelError when a target reaches nothing."""
    total = 0
    for name, projections in find_sites(model, lora.targets, lenient=tuple(lora.targets) == GROUPS).items():
        module: Any = model.get_submodule(name)
        if isinstance(module, HeteroExperts):
            at, rank = module.layout, lora.expert_rank or lora.rank
            outer = 1 if lora.expert_layout == "shared_outer" else at.num_experts
            pair = outer * at.hidden_size + at.num_experts * at.intermediate_size
            total += rank * pair * len(projections)
        else:
            total += lora.rank * (int(module.in_features) + int(module.out_features))
    return total


def kv_bytes_per_token(text: Any) -> int:
    """Bytes of keys and values of one token in all layers, as the KV pool stores them."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        width = heads * (_pad(text.qk_nope_head_dim + text.qk_rope_head_dim) + _pad(text.v_head_dim))
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        width = (getattr(text, "num_key_value_heads", None) or heads) * 2 * _pad(head_dim)
    return int(2 * width * text.num_hidden_layers)


def readable(size: int) -> str:
    """Bytes as people read them."""
    for unit in ("GiB", "MiB"):
        scale = 2 ** {"GiB": 30, "MiB": 20}[unit]
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


def _pad(size: int) -> int:
    return -(-size // PANEL) * PANEL


def _packed(n: int, k: int, how: Packing) -> int:
    return how.nbytes(_pad(n), _pad(k))


def _expert_packing(section: ModelSection, config: Any) -> Packing:
    """How the experts will be packed; of a GGUF file `expert_bytes` knows."""
    if section.experts != AUTO:
        return packing(section.experts, section.group_size, section.symmetric)
    return packing(coding_of(quantization_of(config)).experts)


def _expert_bytes(module: HeteroExperts, how: Packing) -> int:
    at = module.layout
    gate_up = 2 * _packed(at.intermediate_size, at.hidden_size, how)
    return at.num_experts * (gate_up + _packed(at.hidden_size, at.intermediate_size, how))


def _other_bytes(model: nn.Module, dense: str) -> int:
    """All but routed experts. A tied head is packed once, as bf16, and the embeddings are read from it."""
    how = packing("bf16" if dense == "torch" else dense)
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    linears = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Linear)}
    routed = {id(p) for m in model.modules() if isinstance(m, HeteroExperts) for p in m.parameters()}
    rest = {id(p): p for p in model.parameters() if id(p) not in linears and id(p) not in routed}
    packed = sum(
        _packed(m.out_features, m.in_features, BF16 if m.weight is table else how) for m in linears.values()
    )
    return packed + 2 * sum(p.numel() for p in rest.values())


def _activations(text: Any, recipe: Recipe) -> int:
    """The larger of the trainer's kept activations and the engine's one step, roughly."""
    tokens, hidden = recipe.train.micro_batch_tokens, text.hidden_size
    per_expert = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    one_layer = tokens * (16 * hidden + 8 * chosen * per_expert)
    layers = text.num_hidden_layers
    kept = layers * tokens * hidden * 2 if recipe.train.checkpointing == "layer" else layers * one_layer
    logits = 4 * text.vocab_size * recipe.engine.max_num_seqs
    return int(max(kept + one_layer, logits))
