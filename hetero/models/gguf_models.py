"""The model architectures that a GGUF file may hold: what llama.cpp calls their tensors and sizes, and what
Transformers calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hetero.errors import ModelError

Metadata = Callable[..., Any]
"""get(key, *default): a value of the file's metadata; the architecture stands before the key."""

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True)
class GgufModel:
    """One architecture.

    Attributes:
        config: its configuration class in Transformers.
        causal: its class for causal language modelling.
        layer: name of a tensor of a layer in the file -> in Transformers' checkpoints.
        experts: the same for tensors that hold all experts; {} stands for the expert's number.
        options: arguments of `config` that this architecture has beside those of all: name -> metadata key.
        maybe: the same for those that a file need not have.
        biased: tensors of a layer that have a bias.
        fixed: arguments of `config` that no file states, as llama.cpp computes.
        rotated: rows of a head of q and k alternate between the halves of the rotary pairs.
    """

    config: Callable[..., PreTrainedConfig]
    causal: str
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    maybe: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biased: tuple[str, ...] = ()
    rotated: bool = False

    def read_config(
        self, get: Metadata, num_tokens: int, tied: bool, specials: dict[str, int | None]
    ) -> PreTrainedConfig:
        """The configuration that the metadata describe; specials: token ids. Raises ModelError."""
        if get("rope.scaling.type", "none") != "none":
            raise ModelError("the file scales its rotary positions, which cannot be read from GGUF yet")
        heads, hidden = get("attention.head_count"), get("embedding_length")
        head_dim = get("attention.key_length", get("rope.dimension_count", hidden // heads))
        if get("rope.dimension_count", head_dim) != head_dim:
            raise ModelError("the file rotates a part of each head only, which cannot be read from GGUF yet")
        return self.config(
            vocab_size=num_tokens,
            hidden_size=hidden,
            num_hidden_layers=get("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=get("context_length"),
            rms_norm_eps=short(get("attention.layer_norm_rms_epsilon")),
            rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)},
            tie_word_embeddings=tied,
            architectures=[self.causal],
            **specials,
            **{name: get(key) for name, key in self.options.items()},
            **{name: get(key) for name, key in self.maybe.items() if get(key, None) is not None},
            **self.fixed,
        )


_ROUTED = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_LLAMA = GgufModel(
    LlamaConfig,
    "LlamaForCausalLM",
    _ATTENTION | _MLP,
    options={"intermediate_size": "feed_forward_length"},
    rotated=True,
)
_MIXTRAL = GgufModel(
    MixtralConfig,
    "MixtralForCausalLM",
    _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
    _MIXTRAL_EXPERTS,
    options={
        "intermediate_size": "feed_forward_length",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    },
    fixed={"sliding_window": None},
    rotated=True,
)
_MOE = _ATTENTION | {"ffn_gate_inp": "mlp.gate"}
_MODELS = {
    "qwen3moe": GgufModel(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        _MOE | _NORMS | _MLP,
        _EXPERTS,
        options=_ROUTED | {"moe_intermediate_size": "expert_feed_forward_length"},
        maybe={"intermediate_size": "feed_forward_length"},
        fixed={"norm_topk_prob": True},
    ),
    "qwen2moe": GgufModel(
        Qwen2MoeConfig,
        "Qwen2MoeForCausalLM",
        _MOE | _SHARED | _MLP,
        _EXPERTS,
        options=_ROUTED
        | {
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        maybe={"intermediate_size": "feed_forward_length"},
        fixed={"norm_topk_prob": False},
        biased=("attn_q", "attn_k", "attn_v"),
    ),
    "olmoe": GgufModel(
        OlmoeConfig,
        "OlmoeForCausalLM",
        _MOE | _NORMS,
        _EXPERTS,
        options=_ROUTED | {"intermediate_size": "feed_forward_length"},
        maybe={"clip_qkv": "attention.clamp_kqv"},
        fixed={"norm_topk_prob": False},
    ),
}


def gguf_model(architecture: str, num_experts: int) -> GgufModel:
    """The row of an architecture's name in GGUF. Raises ModelError for one that is not known."""
    if architecture == "llama":  # Llama, Mistral, SmolLM; with experts: Mixtral
        return _MIXTRAL if num_experts else _LLAMA
    if architecture not in _MODELS:
        raise ModelError(
            f"the architecture {architecture!r} cannot be read from GGUF; known are llama (and Mixtral), "
            f"{', '.join(sorted(_MODELS))}. Pass the Transformers directory of the original instead."
        )
    return _MODELS[architecture]


def short(value: float) -> float:
    """The shortest decimal of a number that went through fp32: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{value:.7g}")
