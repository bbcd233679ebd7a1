"""The experts of training rows: which are selected again, and what routing looks like in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetero.errors import ArgumentError
from hetero.models.routing_site import RoutingSite
from hetero.train.batch import TrainSample

RoutingReplay = Literal["auto", "on", "off"]


def check_replay(value: str) -> RoutingReplay:
    """`value` as one of the three. Raises ArgumentError."""
    if value not in get_args(RoutingReplay):
        raise ArgumentError(
            f"routing_replay is {value!r}; expected one of {', '.join(get_args(RoutingReplay))}"
        )
    return value  # type: ignore[return-value]


def is_replayed(sample: TrainSample, replay: RoutingReplay, version: int) -> bool:
    """Whether the experts that sampled `sample` are selected again when it is trained under `version`.

    "auto": when another version sampled it. The same version selects the same experts by itself.
    """
    if sample.routes is None or replay == "off":
        return False
    return replay == "on" or sample.adapter_version not in (None, version)


def with_replay(samples: Sequence[TrainSample], replay: RoutingReplay, version: int) -> list[TrainSample]:
    """The samples, without the routes that are not to be replayed."""
    return [
        s if is_replayed(s, replay, version) or s.routes is None else replace(s, routes=None) for s in samples
    ]


class RoutingLog:
    """Sums of what the sites saw, over the micro-batches of one optimizer batch; every row counts once."""

    def __init__(self) -> None:
        self._loads: list[Tensor] = []  # per layer: rows of each expert [E]
        self._num_rows = self._num_on_cpu = 0
        self._margins: list[Tensor] = []
        self._confidence = 0.0
        self._num_flips = self._num_routes = self._num_flipped_rows = self._num_known_rows = 0

    def add(self, sites: Sequence[RoutingSite]) -> None:
        """Take in the last forward of every site."""
        if not sites or any(site.ids is None or site.live is None for site in sites):
            return
        if not self._loads:
            self._loads = [torch.zeros(site.num_experts, dtype=torch.int64) for site in sites]
        flipped: Tensor | None = None
        for load, site in zip(self._loads, sites, strict=True):
            assert site.ids is not None
            assert site.weights is not None
            assert site.live is not None
            self._num_on_cpu += site.on_cpu * site.ids.shape[0]
            load += torch.bincount(site.ids.reshape(-1).cpu(), minlength=site.num_experts)
            weights = site.weights.float().abs()
            total = weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
            self._confidence += float((weights.amax(-1) / total).double().sum())
            if site.margin is not None:
                self._margins.append(site.margin.float().cpu())
            if site.recorded is not None:
                differs = (site.live.sort(-1).values != site.recorded.sort(-1).values).any(-1)
                differs &= site.recorded[:, 0] >= 0
                self._num_flips += int(differs.sum())
                flipped = differs if flipped is None else flipped | differs
        first = sites[0]
        assert first.ids is not None
        self._num_rows += first.ids.shape[0]
        if first.recorded is not None and flipped is not None:
            known = int((first.recorded[:, 0] >= 0).sum())
            self._num_known_rows += known
            self._num_routes += known * len(sites)
            self._num_flipped_rows += int(flipped.sum())

    def metrics(self) -> dict[str, float]:
        """moe/*; nothing for a model without routed experts.

        load_max_over_mean: rows of the busiest expert over the mean, mean over layers. load_entropy: entropy
        of the load over that of an even one, mean over layers. experts_touched: share of the experts that
        computed a row. cpu_expert_frac: share of the (row, layer) pairs whose experts the CPU computed: as
        yet all of them. routing_confidence: share of a row's expert weight that its first expert has, mean
        over rows and layers. route_flip_rate: share of the recorded (row, layer) pairs for which the router
        would now choose other experts; tokens_with_any_flip: share of the rows in which some layer would.
        replayed_tokens: recorded rows. topk_margin_p01: first percentile, over rows and layers, of how much
        the score of the last chosen expert exceeds that of the next, in the router's units; left out where
        all experts are chosen.
        """
        if not self._num_rows:
            return {}
        loads = [load.double() / load.sum() for load in self._loads]
        known = max(self._num_known_rows, 1)
        return {
            "moe/load_max_over_mean": _mean(float(load.max()) * len(load) for load in loads),
            "moe/load_entropy": _mean(_entropy(load) for load in loads),
            "moe/experts_touched": _mean(float((load > 0).double().mean()) for load in loads),
            "moe/cpu_expert_frac": self._num_on_cpu / (self._num_rows * len(loads)),
            "moe/routing_confidence": self._confidence / (self._num_rows * len(loads)),
            "moe/route_flip_rate": self._num_flips / max(self._num_routes, 1),
            "moe/tokens_with_any_flip": self._num_flipped_rows / known,
            "moe/replayed_tokens": float(self._num_known_rows),
            **self._margin(),
        }

    def _margin(self) -> dict[str, float]:
        if not self._margins:
            return {}
        return {"moe/topk_margin_p01": float(np.quantile(torch.cat(self._margins).numpy(), 0.01))}


def lora_grad_experts(params: Mapping[str, torch.nn.Parameter]) -> dict[str, float]:
    """moe/lora_grad_experts_frac: share of the experts whose own LoRA factors have a gradient."""
    shares = [
        float((param.grad.flatten(1) != 0).any(1).double().mean())
        for name, param in params.items()
        if name.endswith((".lora_gate_b", ".lora_down_a")) and param.grad is not None
    ]
    return {"moe/lora_grad_experts_frac": float(np.mean(shares))} if shares else {}


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]


def _entropy(share: Tensor) -> float:
    if len(share) == 1:
        return 1.0
    positive: npt.NDArray[np.float64] = share[share > 0].numpy()
    return float(-(positive * np.log(positive)).sum() / np.log(len(share)))
