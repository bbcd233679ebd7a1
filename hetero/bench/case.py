"""What a kernel benchmark is asked for, and the record that every timed case becomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.bench.machine import Machine
from hetero.bench.timing import Budget, Times
from hetero.errors import ArgumentError
from hetero.formats import FORMATS, packing
from hetero.kernels import cpu

PEERS = {"torch": torch.bfloat16, "torch-fp32": torch.float32}
"""Peers of a kernel: PyTorch on the same numbers in this dtype."""

EXPERT_PEERS = ("kt-kernel", "kt-kernel-bf16", "llama.cpp")
"""Peers of a layer of experts besides, in our format or in bf16."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        shape: a model's name or numbers (see `hetero.bench.shapes`).
        format: of the weights, a name of `hetero.formats`.
        group_size: values of K that share a scale; None: the format's own.
        tokens: rows of every case.
        isas: instruction sets to run; empty: the machine's default.
        backward: time forward and backward instead of forward alone.
        recompute: keep nothing but the inputs for backward.
        lora_rank: rank of low-rank factors beside the weights; 0: none.
        context: attention: positions in the cache of each of `tokens` sequences that decode one token; 0:
            `tokens` new tokens of one sequence.
        against: a peer that is timed in turn with us, one of PEERS or, of experts, EXPERT_PEERS; or None.
        rivals: busy processes beside which a layer of experts is timed once more; 0: none.
        rotate: bytes of weights to go through before the first come again.
    """

    shape: str
    format: str = "bf16"
    group_size: int | None = None
    tokens: tuple[int, ...] = (1, 8, 32, 2048)
    isas: tuple[str, ...] = ()
    backward: bool = False
    recompute: bool = False
    lora_rank: int = 0
    context: int = 0
    against: str | None = None
    rivals: int = 0
    budget: Budget = field(default_factory=Budget)
    rotate: int = 2 * 10**9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ArgumentError(f"--format is {self.format!r}; hetero has {', '.join(FORMATS)}")
        packing(self.format, self.group_size)
        peers = (*PEERS, *EXPERT_PEERS)
        if self.against is not None and self.against not in peers:
            raise ArgumentError(f"--against is {self.against!r}; the peers are {', '.join(peers)}")
        if not self.tokens or min(self.tokens) < 1:
            raise ArgumentError(f"--tokens is {self.tokens}; expected positive numbers such as 1,8,32,2048")

    @property
    def peer_dtype(self) -> torch.dtype:
        return PEERS[self.against or "torch"]

    @property
    def peer_format(self) -> str:
        """Of the weights that the peer multiplies with."""
        named = {"torch": "bf16", "torch-fp32": "fp32", "kt-kernel-bf16": "bf16"}
        return named.get(self.against or "", self.format)


@dataclass(frozen=True, slots=True)
class Work:
    """What one call must do at least: bytes of weights (or of keys and values) read, each once per pass, and
    floating-point operations (two per multiply-add of the products; nothing for recomputation, LoRA,
    activations and padding)."""

    bytes: float
    flops: float


def contexts(settings: Settings, machine: Machine) -> Iterator[cpu.Context]:
    """A context per instruction set that is to be measured, all with the machine's threads."""
    for isa in settings.isas or (machine.isa,):
        yield cpu.Context(threads=machine.threads, isa=isa)


def record(
    op: str, shape: str, tokens: int, settings: Settings, machine: Machine, isa: str, times: Times, work: Work
) -> dict[str, Any]:
    """{op, shape, format, isa, tokens, threads, ms, gbps, tflops, share_of_bandwidth, share_of_peak, ...}"""
    return {
        "op": op,
        "shape": shape,
        "format": settings.format,
        "group_size": packing(settings.format, settings.group_size).group_size,
        "isa": isa,
        "tokens": tokens,
        "threads": machine.threads,
        "backward": settings.backward,
        "lora_rank": settings.lora_rank,
        **times.as_record(),
        **rates(work, times.median, machine, isa),
    }


def rates(work: Work, seconds: float, machine: Machine, isa: str) -> dict[str, float]:
    """{gbps, tflops, share_of_bandwidth, share_of_peak, flops_per_byte} of `work` done in `seconds`."""
    bandwidth, flops = work.bytes / seconds, work.flops / seconds
    return {
        "gbps": bandwidth / 1e9,
        "tflops": flops / 1e12,
        "share_of_bandwidth": bandwidth / machine.read_bandwidth,
        "share_of_peak": flops / machine.peak_flops[isa],
        "flops_per_byte": work.flops / work.bytes,
    }
