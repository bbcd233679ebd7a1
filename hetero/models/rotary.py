"""Rotary embeddings by table: the angle of a position never depends on what else is in the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetero.errors import CapacityError, ModelError

STEP = 4096
"""Positions computed at a time. Fixed, because PyTorch's cos and sin may differ in the last bit between the
vector body and the tail of a call: computed in the same steps, a position has the same value whenever it is
    first asked for."""


class RotaryTable(nn.Module):
    """The cosines and sines of a Transformers rotary module, computed once by that module and then looked up.

    Args:
        original: the module, called as (x, position_ids, ...) with position_ids [1, P].
        limit: positions from here on would change the frequencies (dynamic and long RoPE), so they are
            refused.
    """

    def __init__(self, original: nn.Module, limit: int | None = None) -> None:
        super().__init__()
        self.original = original
        self.limit = limit
        self._tables: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        """Whatever else the original has (its config, its frequencies), for models that look."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "original":
                raise
            return getattr(self.original, name)

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...] | Tensor:
        """x gives dtype and device; position_ids [B, S] -> what the original returns, each [B, S, ...].

        Raises: ModelError for positions of other shapes; CapacityError past `limit`.
        """
        if position_ids.ndim != 2:
            raise ModelError(
                f"hetero looks rotary angles up by position [B, S], got {tuple(position_ids.shape)}"
            )
        needed = int(position_ids.max()) + 1 if position_ids.numel() else 0
        if self.limit is not None and needed > self.limit:
            raise CapacityError(
                f"position {needed - 1} is past {self.limit}, where this model's RoPE starts to depend on "
                "the sequence's "
                "length; keep prompt and completion shorter"
            )
        key = (x.dtype, x.device, args, tuple(sorted(kwargs.items())))
        tables = self._tables.get(key, ())
        if not tables or tables[0].shape[0] < needed:
            tables = self._tables[key] = self._grow(x, tables, needed, args, kwargs)
        found = tuple(table[position_ids] for table in tables)
        return found if len(found) > 1 else found[0]

    @torch.no_grad()
    def _grow(
        self,
        x: Tensor,
        tables: tuple[Tensor, ...],
        needed: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        """Append whole steps until `needed` positions are there."""
        have = tables[0].shape[0] if tables else 0
        steps = [tables] if tables else []
        probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=x.device)
        for start in range(have, max(needed, 1), STEP):
            stop = start + STEP if self.limit is None else min(start + STEP, self.limit)
            positions = torch.arange(start, stop, device=x.device)[None]
            out = self.original(probe, positions, *args, **kwargs)
            parts = out if isinstance(out, tuple) else (out,)
            # A complex table (cos + i sin) keeps its type; others take the dtype that the original would
            # return.
            steps.append(tuple(p[0] if p.is_complex() else p[0].to(x.dtype) for p in parts))
        return tuple(torch.cat(columns) for columns in zip(*steps, strict=True))


def rotary_limit(module: Any) -> int | None:
    """The first position at which the module's frequencies would depend on the sequence's length, or None.

    "dynamic" rescales past the trained length; "longrope" switches factors past the original length.
    """
    kinds = getattr(module, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    config = getattr(module, "config", None)
    if "longrope" in kinds:
        parameters = getattr(config, "rope_parameters", None) or {}
        original = parameters.get("original_max_position_embeddings")
        return int(
            original or getattr(config, "original_max_position_embeddings", 0) or module.original_max_seq_len
        )
    if any("dynamic" in str(kind) for kind in kinds):
        return int(module.original_max_seq_len)
    return None
