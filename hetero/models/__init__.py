"""Transformers models whose experts live in RAM, packed, and whose forward the engine and the trainer
share."""

from hetero.models.adapter import load_adapter, save_adapter
from hetero.models.checkpointing import set_checkpointing
from hetero.models.config import HeteroConfig
from hetero.models.forward import ForwardBatch, forward_hidden
from hetero.models.hashing import base_hash
from hetero.models.head import LmHead, head
from hetero.models.kv import KVPool, KVSpec, kv_spec
from hetero.models.load import load_model
from hetero.models.lora import (
    adapter_version,
    attach_lora,
    bump_adapter_version,
    detach_lora,
    lora_disabled,
    lora_parameters,
)
from hetero.models.lora_config import LoraConfig
from hetero.models.probe import scoring_batch
from hetero.models.quantizer import HeteroQuantizer
from hetero.models.quickstart import BUILTIN_MODELS, resolve_model
from hetero.models.versions import (
    adapter_at,
    adapters_by_rows,
    keep_versions,
    resident_versions,
    retain_version,
)

__all__ = [
    "BUILTIN_MODELS",
    "ForwardBatch",
    "HeteroConfig",
    "HeteroQuantizer",
    "KVPool",
    "KVSpec",
    "LmHead",
    "LoraConfig",
    "adapter_at",
    "adapter_version",
    "adapters_by_rows",
    "attach_lora",
    "base_hash",
    "bump_adapter_version",
    "detach_lora",
    "forward_hidden",
    "head",
    "keep_versions",
    "kv_spec",
    "load_adapter",
    "load_model",
    "lora_disabled",
    "lora_parameters",
    "resident_versions",
    "resolve_model",
    "retain_version",
    "save_adapter",
    "scoring_batch",
    "set_checkpointing",
]
