"""Who else computes a layer of experts, and can be timed in turn with us."""

from __future__ import annotations

from typing import Protocol

import torch

from hetero.bench import against_kt, against_llama, against_torch
from hetero.bench.case import PEERS, Settings
from hetero.bench.moe_check import Expected, Inputs
from hetero.bench.moe_layers import Weights
from hetero.errors import ArgumentError
from hetero.formats import FORMATS
from hetero.kernels.ops import ExpertLoraFactors

_FORWARD_ONLY: dict[str, type[against_kt.Experts] | type[against_llama.Experts]] = {
    "kt-kernel": against_kt.Experts,
    "llama.cpp": against_llama.Experts,
}


class Peer(Protocol):
    """The same layer, in as many copies as ours, computed by somebody else."""

    @property
    def PAUSE(self) -> float:
        """Seconds that its idle threads go on spinning and would take the cores from ours."""

    def forward(self, inputs: Inputs, copy: int, lora: ExpertLoraFactors | None = None) -> torch.Tensor:
        """[T, H], from copy number `copy`."""

    def check(self, inputs: Inputs, expected: Expected, lora: ExpertLoraFactors | None) -> None:
        """Raises WrongResultError when it does not compute the same layer."""


def peer_bytes(settings: Settings, weights: int, num_experts: int) -> int:
    """Bytes of one copy of the peer's layer of `num_experts` experts of `weights` weights each."""
    if settings.against is None:
        return 0
    if settings.against in PEERS:
        return settings.peer_dtype.itemsize * weights * num_experts
    own = weights * num_experts * FORMATS[settings.format].bits // 7  # with scales and its padding
    return 2 * own if settings.against == "kt-kernel" else own


def make_peer(settings: Settings, weights: Weights, copies: int, threads: int) -> Peer | None:
    """The peer that `settings.against` names.

    Raises: UnavailableError when it is not installed, ArgumentError for what it cannot compute.
    """
    name = settings.against
    if name is None:
        return None
    if name in PEERS:
        return against_torch.Experts(weights, copies, settings.peer_dtype)
    if settings.backward or settings.lora_rank:
        raise ArgumentError(f"{name} is compared forward only; drop --backward and --lora-rank, or use torch")
    return _FORWARD_ONLY[name](weights, copies, settings.format, threads, max(settings.tokens))
