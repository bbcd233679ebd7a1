"""The place in a layer where experts are selected: what passes there, and what is put in its place."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetero.errors import ModelError


class TopK(NamedTuple):
    """What `torch.topk` returns."""

    values: Tensor
    indices: Tensor


class RoutingSite:
    """One layer's selection of experts; it only looks on while `watched`.

    Attributes:
        num_experts: E.
        watched: keep what passes; measured: also look at the scores of the selection.
        recorded: [T, top_k] int64 expert ids of an earlier forward, -1 in rows that have none; or None.
        replay: select what was recorded, in the rows that have it.
        ids, weights: [T, top_k] of the last forward.
        on_cpu: whether the CPU computed its experts.
        live: [T, top_k] ids that the router chose in the last forward, before any replay.
        margin: [T] by how much the last chosen expert's score exceeds that of the first one left out, in the
            router's own units; None where nothing is measured or all experts are chosen.
    """

    __slots__ = (
        "ids",
        "live",
        "margin",
        "measured",
        "num_experts",
        "on_cpu",
        "recorded",
        "replay",
        "watched",
        "weights",
    )

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.watched = False
        self.reset()

    def reset(self) -> None:
        """Look on no more, and forget."""
        self.watched = self.measured = self.replay = False
        self.recorded: Tensor | None = None
        self.ids: Tensor | None = None
        self.weights: Tensor | None = None
        self.live: Tensor | None = None
        self.margin: Tensor | None = None
        self.on_cpu = True

    def select(self, scores: Tensor, top_k: int, topk: Callable[[Tensor, int], TopK]) -> TopK | None:
        """The recorded experts of scores [.., E] with their live scores, differentiable; None where nothing
        is replayed, or for a top-k that is not the selection of experts."""
        if scores.shape[-1] != self.num_experts:
            return None
        if top_k < self.num_experts:
            best = topk(scores.detach(), top_k + 1).values.float().sort(-1).values  # some ask for no order
            self.margin = (best[..., 1] - best[..., 0]).reshape(-1)
        recorded = self.recorded
        if recorded is None or not self.replay or top_k != recorded.shape[1]:
            return None
        if scores.numel() != recorded.shape[0] * self.num_experts:
            return None
        live = topk(scores, top_k).indices
        self.live = live.detach().view(recorded.shape)
        ids = torch.where(recorded >= 0, recorded, self.live).view(live.shape)
        return TopK(scores.gather(-1, ids), ids)

    def saw(self, ids: Tensor, weights: Tensor, *, on_cpu: bool = True) -> None:
        """ids, weights [T, top_k] are what the experts are about to compute with, and where.

        Raises ModelError when a selection was to be replayed and was not.
        """
        self.ids, self.weights, self.on_cpu = ids.detach(), weights.detach(), on_cpu
        if not self.replay or self.recorded is None:
            self.live = self.ids
        elif self.live is None or not bool(((self.recorded < 0) | (self.recorded == ids)).all()):
            raise ModelError(
                "the recorded experts cannot be replayed: this model selects experts in a way that hetero "
                "does not know. Set rl.routing_replay to off."
            )


selecting: ContextVar[RoutingSite | None] = ContextVar("hetero_selecting", default=None)
"""The site of the layer that is running, while its selection is replayed."""


def selected(scores: Tensor, top_k: int, topk: Callable[[Tensor, int], TopK]) -> TopK | None:
    """What is selected in place of the top k, if anything is."""
    site = selecting.get()
    return None if site is None else site.select(scores, top_k, topk)


class ReplayedSelection(TorchFunctionMode):
    """Puts the recorded selection in the place of `torch.topk`, for routers that are left to PyTorch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        return _topk(func, *args, **kwargs)


def _topk(func: Callable[..., Any], x: Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
    found = None
    if dim % x.ndim == x.ndim - 1:
        found = selected(x, k, lambda scores, top_k: TopK(*func(scores, top_k, dim=-1, **kwargs)))
    return func(x, k, dim=dim, **kwargs) if found is None else found
