"""The configurations of the models that hetero builds for itself, known before they are built."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

_SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


def builtin_config(name: str) -> PreTrainedConfig | None:
    """Configuration of a name of `BUILTIN_MODELS`, enough to plan its memory; None for any other model."""
    if name == "smollm2-135m":
        return LlamaConfig(**_SMOLLM2)
    if name in ("quickstart", "smollm2-135m-moe8"):
        return MixtralConfig(**_SMOLLM2, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    return None
