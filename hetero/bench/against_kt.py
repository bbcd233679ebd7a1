"""The peer: KTransformers' kt-kernel, the same weights quantised its own way (one scale per row)."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import torch

from hetero.bench.moe_check import Expected, Inputs
from hetero.bench.moe_layers import Weights
from hetero.bench.timing import Budget, check, time_calls
from hetero.errors import ArgumentError, UnavailableError
from hetero.kernels.ops import ExpertLoraFactors

KINDS = {"bf16": "AMXBF16_MOE", "int8": "AMXInt8_MOE", "int4": "AMXInt4_MOE"}
"""Our format -> its class. The names stay where AVX-512 stands in for AMX."""
TOLERANCES = {"bf16": 0.05, "int8": 0.1, "int4": 0.6}
"""Of a row, against the weights as we hold them: one scale per row is coarse, at four bits very."""
INSTALL = "pip install --no-deps kt-kernel"
PROBE = Budget(repeats=3, seconds=0.0)


class Experts:
    """One layer in as many copies as ours, for two sizes of its pool: its waiting thread spins, so that
    on a small machine one worker less may be faster. Every case takes the faster of the two."""

    PAUSE = 0.1
    """Seconds after which its workers, which spin for 50 ms, have gone to sleep."""

    def __init__(self, weights: Weights, copies: int, format: str, threads: int, most_tokens: int) -> None:
        ext = _extension()
        kind = getattr(ext.moe, KINDS.get(format, ""), None)
        if kind is None:
            raise ArgumentError(
                f"--format {format} has no counterpart in this build of kt-kernel "
                f"({ext.__cpu_variant__}); compare {', '.join(KINDS)}"
            )
        if weights.shape.activation != "silu" or weights.shape.bias:
            raise ArgumentError(
                "kt-kernel computes experts with silu and without biases; choose another shape"
            )
        self.format, self.shape = format, weights.shape
        workers = sorted({max(1, threads - 1), threads})
        self.pools = [_Pool(ext, kind, weights, copies, count, most_tokens, format) for count in workers]
        self.best: dict[int, _Pool] = {}

    def forward(self, inputs: Inputs, copy: int, lora: ExpertLoraFactors | None = None) -> torch.Tensor:
        tokens = inputs.x.shape[0]
        if tokens not in self.best:
            self.best[tokens] = min(self.pools, key=lambda pool: pool.seconds(inputs))
        return self.best[tokens].run(inputs, copy)

    def check(self, inputs: Inputs, expected: Expected, lora: ExpertLoraFactors | None) -> None:
        """The peer must compute the same layer. Raises WrongResultError."""
        out = self.forward(inputs, 0)[expected.rows]
        check("kt-kernel's own output", out, expected.out, tolerance=TOLERANCES[self.format])


class _Pool:
    """Its threads, and the copies of the layer that are bound to them."""

    def __init__(
        self,
        ext: Any,
        kind: Any,
        weights: Weights,
        copies: int,
        workers: int,
        most_tokens: int,
        format: str,
    ) -> None:
        config = ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [workers]
        self.queue, self.top_k = ext.CPUInfer(config), weights.shape.top_k
        self.layers = []
        gate, up = (half.contiguous() for half in weights.gate_up.chunk(2, dim=1))
        # It reads ids and masks whenever it likes.
        self.alive = [torch.zeros(weights.shape.E, dtype=torch.bool), torch.arange(weights.shape.E)]
        for index in range(copies):
            config = self._config(ext, weights, gate, up, format)
            config.layer_idx, config.max_len = index, max(most_tokens, 32)
            layer = kind(config)
            self.queue.submit(layer.load_weights_task(self.alive[1].data_ptr()))
            self.queue.sync()
            self.layers.append(layer)

    def _config(self, ext: Any, weights: Weights, gate: torch.Tensor, up: torch.Tensor, format: str) -> Any:
        shape = weights.shape
        sizes = (shape.E, shape.top_k, shape.hidden, shape.intermediate)
        config = ext.moe.MOEConfig(*sizes, self.alive[0].data_ptr())
        config.pool = self.queue.backend_
        config.save = config.load = False
        stacks = {"gate": gate, "up": up, "down": weights.down}
        for name, stack in stacks.items():
            if format != "bf16":
                setattr(config, f"{name}_proj", stack.data_ptr())
                continue
            setattr(config, f"{name}_projs", [[matrix.data_ptr() for matrix in stack]])
            setattr(config, f"{name}_scales", [[0] * shape.E])
        return config

    def seconds(self, inputs: Inputs) -> float:
        """Of one call, after its threads have had time to go to sleep and to wake again."""
        time.sleep(Experts.PAUSE)
        return time_calls(lambda i: self.run(inputs, i % len(self.layers)), PROBE).median

    def run(self, inputs: Inputs, copy: int) -> torch.Tensor:
        out = torch.empty_like(inputs.x)
        count = torch.tensor([inputs.x.shape[0]], dtype=torch.int32)
        tensors = (inputs.ids, inputs.weights, inputs.x, out)
        pointers = (tensor.data_ptr() for tensor in tensors)
        task = self.layers[copy].forward_task(count.data_ptr(), self.top_k, *pointers, False)
        self.queue.submit(task)
        self.queue.sync()
        return out


def _extension() -> Any:
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
