"""Which experts compute which tokens: recorded while sampling, replayed while training.

A replay repeats the selection only. The weights of the selected experts are computed from the scores of now,
so that gradients flow through the router as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hetero.errors import ModelError
from hetero.models.experts import HeteroExperts
from hetero.models.routing_site import ReplayedSelection, RoutingSite, selecting

Routes: TypeAlias = "npt.NDArray[np.integer[Any]]"
"""[tokens, layers with experts, top_k] expert ids, in the order in which the router gave them."""


def routing_sites(model: nn.Module) -> list[RoutingSite]:
    """One site per layer with routed experts, in the order of the model."""
    found: list[RoutingSite] | None = model.__dict__.get("_hetero_sites")
    if found is None:
        found = model.__dict__["_hetero_sites"] = [
            _install(model, name, module)
            for name, module in model.named_modules()
            if isinstance(module, HeteroExperts)
        ]
    return found


@contextmanager
def watched_routing(
    model: nn.Module, recorded: Tensor | None = None, *, replay: bool = False, measure: bool = False
) -> Iterator[list[RoutingSite]]:
    """Within this context every site keeps what passes in the last forward, and in its recomputations.

    Args:
        recorded: [T, layers, top_k] expert ids of an earlier forward over the same rows, -1 where there are
            none: to be compared, or with `replay` to be selected again.
        measure: also keep how near the selections were to others.

    Raises ModelError when `recorded` does not fit the model, or cannot be replayed.
    """
    sites = routing_sites(model)
    if recorded is not None and recorded.shape[1] != len(sites):
        raise ModelError(
            f"routes were recorded in {recorded.shape[1]} layers, but the model has {len(sites)} with experts"
        )
    for number, site in enumerate(sites):
        site.watched, site.replay = True, replay and recorded is not None
        site.measured = measure or site.replay
        if recorded is not None:
            site.recorded = recorded[:, number].long()
    try:
        yield sites
    finally:
        for site in sites:
            site.reset()


def routes_of(model: nn.Module, layers: Sequence[Tensor], rows: Sequence[int]) -> Routes | None:
    """Expert ids of some rows of `layers`, each [T, top_k], in one or two bytes; None without layers."""
    if not layers:
        return None
    wanted = torch.as_tensor(rows, dtype=torch.int64, device=layers[0].device)
    ids = torch.stack([layer.index_select(0, wanted) for layer in layers], dim=1).cpu().numpy()
    most = max(site.num_experts for site in routing_sites(model))
    return ids.astype(np.uint8 if most <= 256 else np.uint16)


def _install(model: nn.Module, name: str, experts: HeteroExperts) -> RoutingSite:
    """The site of `experts`, with the module around them made to replay it."""
    site = experts.routing
    block = model.get_submodule(name.rpartition(".")[0])
    block.forward = _replaying(block.forward, site)
    return site


def _replaying(forward: Callable[..., Any], site: RoutingSite) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not site.measured:
            return forward(*args, **kwargs)
        token = selecting.set(site)
        try:
            with ReplayedSelection():
                return forward(*args, **kwargs)
        finally:
            selecting.reset(token)

    return run
