"""A digest of the base weights: proof that training never wrote to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from hetero.kernels import cpu
from hetero.kernels.cpu import PackedWeight
from hetero.models.experts import HeteroExperts
from hetero.models.linear import HeteroLinear


def base_hash(model: nn.Module) -> str:
    """Hex digest over every base weight of `model`: packed ones, frozen parameters and saved buffers.

    Adapter parameters (their names hold "lora_") do not count. Equal weights give equal digests, whatever
    the thread count or the order of loading.
    """
    tensors = sorted(base_tensors(model), key=lambda item: item[0])
    with ThreadPoolExecutor(cpu.context().threads) as pool:  # hashlib lets go of the interpreter
        digests = pool.map(_digest, tensors)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(item: tuple[str, Tensor]) -> bytes:
    name, tensor = item
    digest = hashlib.sha256(name.encode())  # three times the speed of others where the processor helps
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest.update(flat.numpy())  # type: ignore[arg-type]
    return digest.digest()


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and storage of every base weight; packed weights come in their packed form."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if "lora_" not in name and tensor.device.type != "meta" and tensor.numel():
            yield name, tensor
    for name, module in model.named_modules():
        for part, packed in _packed(module).items():
            yield f"{name}.{part}", packed


def _packed(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, HeteroLinear) and isinstance(module.packed, PackedWeight):
        return {"weight": module.packed.data}
    if isinstance(module, HeteroExperts) and module.store is not None:
        store = module.store
        parts = {"gate_up": store.gate_up.data, "down": store.down.data}
        biases = {"gate_up_bias": store.gate_up_bias, "down_bias": store.down_bias}
        return parts | {key: bias for key, bias in biases.items() if bias is not None}
    return {}
