"""The engine's view of a Transformers model made by `load_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetero.errors import CapacityError
from hetero.models.forward import ForwardBatch, forward_hidden
from hetero.models.head import head
from hetero.models.kv import KVPool
from hetero.models.lora import adapter_version, lora_active, lora_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hetero.kernels.batch import AttentionBatch


class ModelRunner:
    """A `Runner` over the module that the trainer trains, with a KV pool of its own.

    Args:
        model: from `load_model`.
        kv_memory: bytes of the pool.

    Raises:
        CapacityError: kv_memory holds less than one block.
    """

    def __init__(self, model: PreTrainedModel, *, kv_memory: int) -> None:
        block_bytes = KVPool.block_bytes(model)
        if kv_memory < block_bytes:
            raise CapacityError(
                f"kv_memory is {kv_memory} bytes; one block of this model's KV cache takes {block_bytes}. "
                "Give the engine at least some hundred blocks."
            )
        config = model.config.get_text_config(decoder=True)
        self.store = KVPool(model, kv_memory // block_bytes)
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(config.max_position_embeddings)
        self.eos_ids = _ids(config.eos_token_id)
        if model.generation_config is not None:
            self.eos_ids |= _ids(model.generation_config.eos_token_id)
        self._model = model
        self._masters: tuple[int, list[torch.nn.Parameter]] = (-1, [])

    def namespace(self) -> str:
        """The version, and the writes to the masters: a changed weight never meets old keys and values."""
        if not lora_active(self._model):
            return "base"
        version = adapter_version(self._model)
        if self._masters[0] != version or not self._masters[1]:
            self._masters = version, list(lora_parameters(self._model).values())
        return f"policy:{version}:{sum(master._version for master in self._masters[1])}"

    def adapter_version(self) -> int:
        """Version of the adapter, also while it is disabled."""
        return adapter_version(self._model)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch
    ) -> torch.Tensor:
        """Final hidden states [T, H], on the model's device."""
        device = self._model.device
        batch = ForwardBatch(token_ids.to(device), positions.to(device), attention, self.store.layers)
        return forward_hidden(self._model, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> fp32 [N, V] in RAM."""
        return head(self._model).logits(hidden).cpu()


def _ids(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
