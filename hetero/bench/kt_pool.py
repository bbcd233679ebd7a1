"""kt-kernel's compiled part, and its pools of threads, of which the faster is timed."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from hetero.bench.moe_check import Inputs
from hetero.bench.shapes import MoeShape
from hetero.bench.timing import Budget, time_calls
from hetero.errors import ArgumentError, UnavailableError

INSTALL = "pip install --no-deps kt-kernel"
PAUSE = 0.1
"""Seconds after which its workers, which spin for 50 ms, have gone to sleep."""
ROUNDS, PROBE = 2, Budget(repeats=1, seconds=0.2)
"""How often each size of the pool is tried, in turn: what counts is its best, for other processes only
make a call slower."""
MULTIPLE = 32
"""Of its sizes: it reads beyond the end of others. Its rows come in blocks of as many."""


class Pool:
    """Threads of its own, and the copies of a layer that are bound to them."""

    def __init__(self, ext: Any, workers: int) -> None:
        config = ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [workers]
        self.queue = ext.CPUInfer(config)
        self.layers: list[Any] = []

    def do(self, task: Any) -> None:
        self.queue.submit(task)
        self.queue.sync()

    def run(self, inputs: Inputs, copy: int) -> object:
        raise NotImplementedError

    def seconds(self, inputs: Inputs) -> float:
        """Of one call, after its threads have had time to go to sleep and to wake again."""
        time.sleep(PAUSE)
        return time_calls(lambda i: self.run(inputs, i % len(self.layers)), PROBE, warm_up=0).median


AnyPool = TypeVar("AnyPool", bound=Pool)


class Faster(Generic[AnyPool]):
    """Two sizes of its pool: its waiting thread spins, so that on a small machine one worker less may be
    faster. Every number of tokens takes the faster of the two."""

    def __init__(self, make: Callable[[int], AnyPool], threads: int) -> None:
        self.pools = [make(workers) for workers in sorted({max(1, threads - 1), threads})]
        self.best: dict[int, AnyPool] = {}

    def of(self, inputs: Inputs) -> AnyPool:
        tokens = inputs.x.shape[0]
        if tokens not in self.best:
            for pool in self.pools:
                pool.run(inputs, 0)  # makes what only a first call makes
            tries = [[pool.seconds(inputs) for pool in self.pools] for _ in range(ROUNDS)]
            seconds = [min(own) for own in zip(*tries, strict=True)]
            self.best[tokens] = self.pools[seconds.index(min(seconds))]
        return self.best[tokens]


def layer_class(ext: Any, kinds: dict[str, str], format: str) -> Any:
    """Its class for layers of a format. Raises ArgumentError, and UnavailableError where a build lacks it."""
    if format not in kinds:
        raise ArgumentError(f"--format {format} has no counterpart in kt-kernel; compare {', '.join(kinds)}")
    kind = getattr(ext.moe, kinds[format], None)
    if kind is None:
        raise UnavailableError(
            f"kt-kernel has loaded its variant {ext.__cpu_variant__}, which has no {kinds[format]}; if this "
            "processor has AVX512-BF16, or AMX, set KT_KERNEL_CPU_VARIANT=avx512_bf16 or amx"
        )
    return kind


def check_shape(shape: MoeShape) -> None:
    """Raises ArgumentError for a layer that it does not compute."""
    if shape.activation != "silu" or shape.bias:
        raise ArgumentError("kt-kernel computes experts with silu and without biases; choose another shape")
    if shape.hidden % MULTIPLE or shape.intermediate % MULTIPLE:
        raise ArgumentError(
            f"kt-kernel is compared where hidden and intermediate are multiples of {MULTIPLE}; got "
            f"hidden={shape.hidden}, intermediate={shape.intermediate}"
        )


def whole_blocks(tokens: int) -> int:
    """Rows that a layer must have room for; it does not check them."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def extension() -> Any:
    """Its compiled part, loaded only when it is asked for. Raises UnavailableError."""
    try:
        package = importlib.import_module("kt_kernel")
    except ImportError as error:
        raise UnavailableError(
            f"--against kt-kernel needs kt-kernel, which cannot be imported ({error}): {INSTALL}"
        ) from None
    _keep_standard_output()
    return package.kt_kernel_ext


def _keep_standard_output() -> None:
    """Send what it prints from C to standard error: on standard output are our records."""
    standard = sys.__stdout__
    if standard is None or sys.stdout is not standard or standard.fileno() != 1:
        return
    standard.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(ours, "w", encoding="utf-8", buffering=1)  # noqa: SIM115


def pointers(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Where its tasks read and write; the tensors must stay until these are done."""
    return tuple(tensor.data_ptr() for tensor in tensors)
