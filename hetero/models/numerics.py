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
from hetero.models.versions import BASE, computed_factors, version_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel, key: str | None = None) -> dict[str, str]:
    """Everything that keys, values and logits depend on, by name: the same in every process.

    Models with equal fingerprints compute equal bits from equal tokens. `weights` and `adapter` are digests
    ("" without an adapter); reading all weights takes some seconds per GiB and thread, once for a model.

    Args:
        key: of a resident version of the adapter, see `version_key`; by default of what the model computes
            now.

    Raises ModelError for a version that is not resident.
    """
    key = version_key(model) if key is None else key
    placement: Any = model.hetero
    device = model.device
    return {
        "weights": _weights(model),
        "adapter": "" if key == BASE else adapter_hash(model, key),
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


def adapter_hash(model: PreTrainedModel, key: str) -> str:
    """Hex digest over the names, scales and values of a resident version, as they are computed with."""
    total = hashlib.sha256()
    for name, (scale, factors) in computed_factors(model, key).items():
        total.update(f"{name} {scale!r} ".encode())
        for part, factor in factors.items():
            total.update(f"{part} {factor.dtype} {tuple(factor.shape)} ".encode())
            data = factor.cpu().contiguous().view(-1).view(torch.uint8)
            total.update(data.numpy())  # type: ignore[arg-type]
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
