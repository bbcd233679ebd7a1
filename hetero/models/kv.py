"""The paged KV store of a model: its shape per layer, and the pool that holds the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hetero.errors import CapacityError
from hetero.kernels.batch import KV_BLOCK, KVLayer
from hetero.models.probe import attention_calls

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of what one attention layer keeps per token.

    Attributes:
        num_kv_heads: heads of keys and values.
        head_dim: elements of one key.
        v_head_dim: elements of one value.
        window: sliding window in tokens, or None when every earlier token stays visible.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None


def kv_spec(model: PreTrainedModel) -> list[KVSpec]:
    """One `KVSpec` per attention layer, in layer order, as the model itself calls attention.

    Found by running two tokens once and remembered on the model, so that any architecture tells the truth
    (MLA expands its latent into heads, hybrid models mix windows). Raises ModelError for layers that do not
    attend.
    """
    return [
        KVSpec(call.num_kv_heads, call.head_dim, call.v_head_dim, call.window)
        for call in attention_calls(model)
    ]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class KVPool:
    """Blocks of `KV_BLOCK` tokens for every layer of a model, allocated once.

    Block `i` of every layer belongs to the same owner: one block table serves all layers.

    Attributes:
        layers: one `KVLayer` per attention layer: k bf16 [num_blocks, Hkv, Dpad/2, 32, 2] and
            v bf16 [num_blocks, Hkv, Dvpad/32, 16, 32, 2].
        num_blocks: blocks per layer.
        bytes_per_block: bytes that one block takes over all layers.
        on_gpu: whether the blocks lie in a GPU's memory.
    """

    def __init__(self, model: PreTrainedModel, num_blocks: int) -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"a KV pool needs at least one block, got {num_blocks}; give the engine more kv_memory"
            )
        self.num_blocks = num_blocks
        try:
            self.layers = [_layer(spec, num_blocks, model.device) for spec in kv_spec(model)]
        except RuntimeError as error:  # of PyTorch's allocators
            size = num_blocks * self.block_bytes(model) / 2**30
            raise CapacityError(
                f"a KV pool of {size:,.1f} GiB cannot be had on {model.device}; give less kv_memory"
            ) from error
        self.on_gpu = model.device.type == "cuda"
        tensors = [part.view(num_blocks, -1).view(torch.uint8) for kv in self.layers for part in (kv.k, kv.v)]
        # Of [num_blocks, bytes]. A row is small, and NumPy copies it with a third of PyTorch's overhead.
        self._parts: list[Any] = tensors if self.on_gpu else [part.numpy() for part in tensors]
        ends = list(accumulate(part.shape[1] for part in tensors))
        self._places = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self.bytes_per_block = ends[-1]

    @staticmethod
    def block_bytes(model: PreTrainedModel) -> int:
        """Bytes of one block over all layers, without allocating anything."""
        return sum(_block_elements(spec) * 2 for spec in kv_spec(model))

    def copy_block(self, src: int, dst: int) -> None:
        """Copy block `src` over block `dst` in every layer (copy on write)."""
        for part in self._parts:
            part[dst] = part[src]

    def read_block(self, i: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy block `i` into `out` [bytes_per_block]: of each layer in turn its keys, then its values."""
        parts = [part[i] for part in self._parts]
        if self.on_gpu:
            torch.from_numpy(out).copy_(torch.cat(parts))
        else:
            np.concatenate(parts, out=out)

    def write_block(self, i: int, data: npt.NDArray[np.uint8]) -> None:
        """Fill block `i` with what `read_block` gave."""
        source: Any = torch.from_numpy(data).to(self.layers[0].k.device) if self.on_gpu else data
        for part, place in zip(self._parts, self._places, strict=True):
            part[i] = source[place]


def _block_elements(spec: KVSpec) -> int:
    return spec.num_kv_heads * KV_BLOCK * (_round_up(spec.head_dim, 32) + _round_up(spec.v_head_dim, 32))


def _layer(spec: KVSpec, num_blocks: int, device: torch.device) -> KVLayer:
    d, dv = _round_up(spec.head_dim, 32), _round_up(spec.v_head_dim, 32)
    k = torch.zeros(num_blocks, spec.num_kv_heads, d // 2, KV_BLOCK, 2, dtype=torch.bfloat16, device=device)
    v = torch.zeros(
        num_blocks, spec.num_kv_heads, dv // 32, KV_BLOCK // 2, 32, 2, dtype=torch.bfloat16, device=device
    )
    return KVLayer(k=k, v=v)
