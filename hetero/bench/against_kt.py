"""The peer: KTransformers' kt-kernel, the same weights quantised its own way (one scale per row)."""

from __future__ import annotations

from typing import Any

import torch

from hetero.bench.kt_pool import (
    PAUSE,
    Faster,
    Pool,
    check_shape,
    extension,
    layer_class,
    pointers,
    whole_blocks,
)
from hetero.bench.moe_check import Expected, Inputs
from hetero.bench.moe_layers import Weights
from hetero.bench.timing import check

KINDS = {"bf16": "AMXBF16_MOE", "int8": "AMXInt8_MOE", "int4": "AMXInt4_MOE"}
"""Our format -> its class. The names stay where AVX-512 stands in for AMX."""
TOLERANCES = {"bf16": 0.05, "int8": 0.1, "int4": 0.6}
"""Of a row, against the weights as we hold them: one scale per row is coarse, at four bits very."""


class Experts:
    """One layer in as many copies as ours, forward, for two sizes of its pool."""

    PAUSE = PAUSE

    def __init__(self, weights: Weights, copies: int, format: str, threads: int, most_tokens: int) -> None:
        ext = extension()
        kind = layer_class(ext, KINDS, format)
        check_shape(weights.shape)
        self.format = format
        self.faster = Faster(
            lambda workers: _Pool(ext, kind, weights, copies, workers, most_tokens, format), threads
        )

    def run(self, inputs: Inputs, copy: int) -> torch.Tensor:
        return self.faster.of(inputs).run(inputs, copy)

    def check(self, inputs: Inputs, expected: Expected) -> None:
        """The peer must compute the same layer. Raises WrongResultError."""
        out = self.run(inputs, 0)[expected.rows]
        check("kt-kernel's own output", out, expected.out, tolerance=TOLERANCES[self.format])


class _Pool(Pool):
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
        super().__init__(ext, workers)
        self.top_k = weights.shape.top_k
        gate, up = (half.contiguous() for half in weights.gate_up.chunk(2, dim=1))
        # It reads ids and masks whenever it likes.
        self.alive = [torch.zeros(weights.shape.E, dtype=torch.bool), torch.arange(weights.shape.E)]
        for index in range(copies):
            config = self._config(ext, weights, gate, up, format)
            config.layer_idx, config.max_len = index, whole_blocks(most_tokens)
            layer = kind(config)
            self.do(layer.load_weights_task(self.alive[1].data_ptr()))
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

    def run(self, inputs: Inputs, copy: int) -> torch.Tensor:
        out = torch.empty_like(inputs.x)
        count = torch.tensor([inputs.x.shape[0]], dtype=torch.int32)
        where = pointers(inputs.ids, inputs.weights, inputs.x, out)
        self.do(self.layers[copy].forward_task(count.data_ptr(), self.top_k, *where, False))
        return out
