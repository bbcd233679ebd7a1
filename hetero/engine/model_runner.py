"""The engine's view of a Transformers model made by `load_model`."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from hetero.errors import CapacityError
from hetero.kernels import cpu
from hetero.models.forward import ForwardBatch, forward_hidden
from hetero.models.head import head
from hetero.models.kv import KVPool
from hetero.models.lora import Factors, adapter_version, lora_active, lora_factors, lora_parameters
from hetero.models.numerics import fingerprint

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
        self._isa = cpu.isa()
        self._factors: list[Factors] = []
        self._masters: list[torch.nn.Parameter] = []
        self._num_sets = 0  # of masters that were seen

    def namespace(self) -> str:
        """Base, or the version, the set of masters and the writes to them: a weight that changed, announced
        by a new version or not, never meets the keys and values of the old one. Keys and values of another
        instruction set are as foreign."""
        isa = cpu.isa()
        other = "" if isa == self._isa else f":{isa}"
        if not lora_active(self._model):
            return f"base{other}"
        factors = list(lora_factors(self._model).values())
        if len(factors) != len(self._factors) or any(map(operator.is_not, factors, self._factors)):
            self._factors, self._masters = factors, list(lora_parameters(self._model).values())
            self._num_sets += 1
        writes = sum(master._version for master in self._masters)
        return f"policy:{adapter_version(self._model)}:{self._num_sets}:{writes}{other}"

    def fingerprint(self) -> dict[str, str]:
        """See `hetero.models.numerics.fingerprint`."""
        return fingerprint(self._model)

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
