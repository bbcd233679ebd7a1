"""Transformers models whose experts live in RAM, packed, and whose forward the engine and the trainer
share."""

from hetero.models.checkpointing import set_checkpointing
from hetero.models.config import HeteroConfig
from hetero.models.forward import ForwardBatch, forward_hidden
from hetero.models.hashing import base_hash
from hetero.models.head import LmHead, head
from hetero.models.kv import KVPool, KVSpec, kv_spec
from hetero.models.load import load_model
from hetero.models.probe import scoring_batch
from hetero.models.quantizer import HeteroQuantizer

__all__ = [
    "ForwardBatch",
    "HeteroConfig",
    "HeteroQuantizer",
    "KVPool",
    "KVSpec",
    "LmHead",
    "base_hash",
    "forward_hidden",
    "head",
    "kv_spec",
    "load_model",
    "scoring_batch",
    "set_checkpointing",
]
