"""Who else computes a layer of experts, and can be timed in turn with us."""

from __future__ import annotations

from typing import Protocol

from hetero.bench import against_kt, against_kt_sft, against_llama, against_torch
from hetero.bench.case import PEERS, Settings
from hetero.bench.moe_check import Expected, Inputs
from hetero.bench.moe_layers import Loras, Weights
from hetero.errors import ArgumentError
from hetero.formats import FORMATS


class Peer(Protocol):
    """The same layer, in as many copies as ours, computed by somebody else."""

    @property
    def PAUSE(self) -> float:
        """Seconds that its idle threads go on spinning and would take the cores from ours."""

    def run(self, inputs: Inputs, copy: int) -> object:
        """What is timed, on copy number `copy`: forward, and backward if that is asked for."""

    def check(self, inputs: Inputs, expected: Expected) -> None:
        """Raises WrongResultError when it does not compute the same layer."""


def peer_bytes(settings: Settings, weights: int, num_experts: int) -> int:
    """Bytes of one copy of the peer's layer of `num_experts` experts of `weights` weights each."""
    if settings.against is None:
        return 0
    if settings.against in PEERS:
        return settings.peer_dtype.itemsize * weights * num_experts
    own = weights * num_experts * FORMATS[settings.peer_format].bits // 7  # with scales and its padding
    if settings.against == "llama.cpp":
        return own
    # Two sizes of its pool; to train, its weights and their transpose.
    return 5 * own if settings.backward else 2 * own


def make_peer(settings: Settings, weights: Weights, loras: Loras, threads: int) -> Peer | None:
    """The peer that `settings.against` names, with the factors of every copy.

    Raises: UnavailableError when it is not installed, ArgumentError for what it cannot compute.
    """
    name = settings.against
    if name is None:
        return None
    if name in PEERS:
        return against_torch.Experts(weights, loras, settings.peer_dtype, settings.backward)
    how = (settings.peer_format, threads, max(settings.tokens))
    if name == "llama.cpp":
        if settings.backward or settings.lora_rank:
            raise ArgumentError(
                f"{name} is compared forward only; drop --backward and --lora-rank, or use torch"
            )
        return against_llama.Experts(weights, len(loras), *how)
    if settings.backward != bool(settings.lora_rank):
        raise ArgumentError(
            f"{name} is compared forward without low-rank factors, and forward and backward with them; give "
            "both --backward and --lora-rank or neither"
        )
    if settings.backward:
        return against_kt_sft.Experts(weights, loras, *how)
    return against_kt.Experts(weights, len(loras), *how)
