"""What the engine needs of a model, and that of a Transformers model."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from hetero.engine.kv_cache import BlockStore
from hetero.engine.sequence import Routes

if TYPE_CHECKING:
    from hetero.kernels.batch import AttentionBatch

Runs: TypeAlias = Sequence[tuple[str, int]]
"""(name of the weights, number of rows), in the order of the rows: which weights compute which rows."""


@runtime_checkable
class Runner(Protocol):
    """Computes hidden states over a paged KV store, and logits."""

    @property
    def store(self) -> BlockStore:
        """The blocks of the KV cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, prompt and completion."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a sequence by themselves."""
        ...

    def namespace(self, version: int | None = None) -> str:
        """Names the weights of an adapter version that is in memory, by default of what runs now: "base", or
        a name that starts with "policy:<version>".

        Equal names promise equal bits."""
        ...

    def resident(self) -> Set[str]:
        """Names of all weights that `forward` and `logits` can compute with now."""
        ...

    def versions(self) -> Sequence[int]:
        """Numbers of the adapter versions that are in memory, the current one last."""
        ...

    def fingerprint(self, name: str | None = None) -> dict[str, str]:
        """All that keys and values in a resident namespace depend on (by default that of now), the same in
        every other process. May take seconds at first.

        Needed by caches on disk and by sessions that move only."""
        ...

    def adapter_version(self) -> int:
        """Version of the adapter."""
        ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, runs: Runs
    ) -> torch.Tensor:
        """Write the keys and values of all T tokens, then return their final hidden states [T, H]."""
        ...

    def routes(self, rows: Sequence[int]) -> Routes | None:
        """Expert ids [R, layers, top_k] of some rows of the last `forward`; None if not recorded."""
        ...

    def logits(self, hidden: torch.Tensor, runs: Runs) -> torch.Tensor:
        """[N, H] -> fp32 [N, V]."""
        ...


def is_base(name: str) -> bool:
    """Whether a namespace is that of the model without its adapter."""
    return name.split(":")[0] == "base"
