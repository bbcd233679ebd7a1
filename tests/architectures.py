"""Random tiny checkpoints of many architectures, saved by Transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral_window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "olmoe": ("Olmoe", {**MOE, "clip_qkv": None}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "qkv_bias": True},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
    ),
    "granite": ("Granite", {"logits_scaling": 8.0, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 0.25, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": (
        "Gemma2",
        {
            "final_logit_softcapping": 7.0,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
}


def save_tiny(name: str, directory: Path, **sizes: Any) -> Path:
    """Write the bf16 checkpoint of a random model of architecture `name`; every weight and bias is
    non-trivial. sizes: options of the configuration that shall differ."""
    prefix, options = ARCHITECTURES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**BASE, **options, **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if key.endswith("norm.weight"):
                    tensor.uniform_(0.5, 1.5)
                elif "bias" in key or "sinks" in key:
                    tensor.normal_(std=0.5)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
