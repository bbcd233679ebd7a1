"""A tiny random model for a doctor who was shown none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig


@contextmanager
def tiny_model() -> Iterator[Path]:
    """Directory of a random Qwen3-MoE checkpoint: 2 layers, 8 experts, 3 per token, odd sizes; gone at the
    end."""
    options: dict[str, Any] = {
        "vocab_size": 301,
        "hidden_size": 76,
        "intermediate_size": 90,
        "moe_intermediate_size": 45,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with tempfile.TemporaryDirectory(prefix="hetero-doctor-") as directory:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            config: PreTrainedConfig = Qwen3MoeConfig(**options)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(directory)
        yield Path(directory)
