"""The engine's view of a Transformers model made by `load_model`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from hetero.errors import CapacityError
from hetero.kernels import cpu
from hetero.models.forward import ForwardBatch, forward_hidden
from hetero.models.head import head
from hetero.models.kv import KVPool
from hetero.models.lora import adapter_version
from hetero.models.numerics import fingerprint
from hetero.models.routing import Routes, routes_of, watched_routing
from hetero.models.versions import adapters_by_rows, is_adapted, resident_keys, resident_versions, version_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hetero.engine.runner import Runs
    from hetero.kernels.batch import AttentionBatch


class ModelRunner:
    """A `Runner` over the module that the trainer trains, with a KV pool of its own.

    Args:
        model: from `load_model`.
        kv_memory: bytes of the pool.
        record_routing: keep the expert ids of every forward.

    Raises:
        CapacityError: kv_memory holds less than one block.
    """

    def __init__(self, model: PreTrainedModel, *, kv_memory: int, record_routing: bool = False) -> None:
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
        self._record_routing = record_routing
        self._layers: list[torch.Tensor] = []  # [T, top_k] of each layer in the last forward
        self._isa = cpu.isa()

    def namespace(self, version: int | None = None) -> str:
        """See `hetero.models.versions.version_key`: a weight that changed, announced by a new version or not,
        never meets the keys and values of the old one. Keys and values of another instruction set are as
        foreign."""
        return version_key(self._model, version) + self._suffix()

    def resident(self) -> set[str]:
        """Names of the base model and of every version that is in memory."""
        suffix = self._suffix()
        return {key + suffix for key in resident_keys(self._model)}

    def _suffix(self) -> str:
        isa = cpu.isa()
        return "" if isa == self._isa else f":{isa}"

    def _weights(self, runs: Runs) -> AbstractContextManager[None]:
        suffix = self._suffix()
        return adapters_by_rows(self._model, [(name.removesuffix(suffix), rows) for name, rows in runs])

    def fingerprint(self, name: str | None = None) -> dict[str, str]:
        """See `hetero.models.numerics.fingerprint`."""
        return fingerprint(self._model, None if name is None else name.removesuffix(self._suffix()))

    def versions(self) -> list[int]:
        """Numbers of the versions that are in memory, the current one last."""
        return resident_versions(self._model)

    def adapter_version(self) -> int:
        """Version of the adapter, also while it is disabled."""
        return adapter_version(self._model)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, runs: Runs
    ) -> torch.Tensor:
        """Final hidden states [T, H], on the model's device."""
        device = self._model.device
        batch = ForwardBatch(token_ids.to(device), positions.to(device), attention, self.store.layers)
        with self._weights(runs):
            if not self._record_routing:
                return forward_hidden(self._model, batch)
            with watched_routing(self._model) as sites:
                hidden = forward_hidden(self._model, batch)
                self._layers = [site.ids for site in sites if site.ids is not None]
            return hidden

    def routes(self, rows: Sequence[int]) -> Routes | None:
        """Expert ids of some rows of the last `forward`, if they are recorded."""
        return routes_of(self._model, self._layers, rows)

    def logits(self, hidden: torch.Tensor, runs: Runs) -> torch.Tensor:
        """[N, H] -> fp32 [N, V] in RAM."""
        if not is_adapted(self._model, self._model.get_output_embeddings()):
            return head(self._model).logits(hidden).cpu()
        with self._weights(runs):
            return head(self._model).logits(hidden).cpu()


def _ids(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
