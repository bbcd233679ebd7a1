"""What the bits of a model's results depend on, apart from its inputs."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hetero.kernels import cpu
from hetero.kernels.batch import KV_BLOCK
from hetero.models.hashing import base_hash, base_tensors
from hetero.models.lora import lora_active, lora_factors, lora_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Everything that keys, values and logits depend on, by name: the same in every process.

    Models with equal fingerprints compute equal bits from equal tokens. `weights` and `adapter` are digests
    ("" while no adapter is active); reading all weights takes some seconds per GiB and thread, once for a
    model.
    """
    placement: Any = model.hetero
    device = model.device
    return {
        "weights": _weights(model),
        "adapter": adapter_hash(model) if lora_active(model) else "",
        "config": _config(model.config),
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "experts": placement.experts,
        "dense": placement.dense,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "instruction set": cpu.isa(),
        "code": _code(),
        "KV block": str(KV_BLOCK),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def adapter_hash(model: PreTrainedModel) -> str:
    """Hex digest over the names, values and scales of the adapter's masters."""
    total = hashlib.sha256()
    for name, factors in lora_factors(model).items():
        total.update(f"{name} {factors.scale!r} ".encode())
    for name, master in lora_parameters(model).items():
        total.update(f"{name} {tuple(master.shape)} ".encode())
        total.update(master.detach().cpu().contiguous().numpy())  # type: ignore[arg-type]
    return total.hexdigest()


def _weights(model: PreTrainedModel) -> str:
    """`base_hash`, computed again only when somebody wrote to a base weight."""
    writes = [tensor._version for _, tensor in base_tensors(model)]
    known: tuple[list[int], str] | None = model.__dict__.get("_hetero_weights")
    if known is None or known[0] != writes:
        known = model.__dict__["_hetero_weights"] = (writes, base_hash(model))
    return known[1]


def _config(config: Any) -> str:
    """Digest of all settings but where the model came from."""
    settings = {
        k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Digest of the kernels and of the modules that call them: no change of theirs can be forgotten."""
    total = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    sources = [path for part in ("kernels", "experts", "models") for path in (package / part).rglob("*.py")]
    for path in [cpu.EXTENSION, *sorted(sources)]:
        total.update(hashlib.blake2b(path.read_bytes()).digest())
    return total.hexdigest()
