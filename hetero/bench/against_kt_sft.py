"""The peer: the layer that kt-kernel trains, forward and backward, low-rank factors on all projections."""

from __future__ import annotations

from typing import Any, NamedTuple

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
from hetero.bench.moe_check import Expected, Inputs, check_gradients, of_expected_rows
from hetero.bench.moe_layers import Loras, Weights
from hetero.bench.timing import TOLERANCE, check
from hetero.kernels.ops import ExpertLoraFactors
from hetero.kernels.ops.expert_lora import FACTORS

KINDS = {"bf16": "AMXBF16_SFT_MOE", "int8": "AMXInt8_SFT_MOE", "int4": "AMXInt4_SFT_MOE"}
"""Our format -> its class. The names stay where AVX-512 stands in for AMX."""
SLACK = {"bf16": 2.0, "int8": 5.0, "int4": 30.0}
"""Times what we allow ourselves: it rounds factors' gradients to bf16, and one scale per row is coarse."""


class Gradients(NamedTuple):
    """Where a backward writes: of x, of the experts' weights, and of the factors by name, one per expert."""

    x: torch.Tensor
    weights: torch.Tensor
    factors: dict[str, torch.Tensor]


class Experts:
    """One layer in as many copies as ours, for two sizes of its pool."""

    PAUSE = PAUSE

    def __init__(self, weights: Weights, loras: Loras, format: str, threads: int, most_tokens: int) -> None:
        ext = extension()
        kind = layer_class(ext, KINDS, format)
        check_shape(weights.shape)
        self.slack = SLACK[format]
        self.shared = [name for name, own in _named(loras[0]).items() if own.ndim == 2]
        adds = format == "int4"
        self.faster = Faster(
            lambda workers: _Pool(ext, kind, weights, loras, workers, most_tokens, adds), threads
        )

    def run(self, inputs: Inputs, copy: int) -> tuple[torch.Tensor, Gradients]:
        return self.faster.of(inputs).run(inputs, copy)

    def check(self, inputs: Inputs, expected: Expected) -> None:
        """Output and every gradient must be those of the same layer. Raises WrongResultError."""
        out, gradients = self.run(of_expected_rows(inputs, expected), 0)
        own = out[expected.rows]
        check("kt-kernel's own output", own, expected.out, tolerance=self.slack * TOLERANCE)
        factors = {
            name: own.float().sum(dim=0) if name in self.shared else own
            for name, own in gradients.factors.items()
        }
        check_gradients("kt-kernel", gradients.x, gradients.weights, factors, expected, self.slack)


class _Pool(Pool):
    """`adds`: gradients of the inner factors are added to what was there."""

    def __init__(
        self,
        ext: Any,
        kind: Any,
        weights: Weights,
        loras: Loras,
        workers: int,
        most_tokens: int,
        adds: bool,
    ) -> None:
        super().__init__(ext, workers)
        self.shape, self.adds = weights.shape, adds
        gate, up = (half.contiguous() for half in weights.gate_up.chunk(2, dim=1))
        # It reads these whenever it likes, the factors in every call.
        self.order = torch.arange(self.shape.E)
        self.factors = [[_of_each(f, self.shape.E) for f in _named(lora).values()] for lora in loras]
        self.gradients = [torch.empty_like(factor) for factor in self.factors[0]]
        for index, (lora, factors) in enumerate(zip(loras, self.factors, strict=True)):
            config = self._config(ext, lora)
            config.layer_idx, config.max_len = index, whole_blocks(most_tokens)
            config.gate_proj, config.up_proj, config.down_proj = pointers(gate, up, weights.down)
            layer = kind(config)
            self.do(layer.load_weights_task())
            layer.update_lora_weights(*pointers(*factors))
            self.layers.append(layer)

    def _config(self, ext: Any, lora: ExpertLoraFactors | None) -> Any:
        shape, rank = self.shape, self.factors[0][0].shape[1]
        config = ext.moe.MOESFTConfig(shape.E, shape.top_k, shape.hidden, shape.intermediate)
        config.pool = self.queue.backend_
        config.physical_to_logical_map = self.order.data_ptr()
        config.lora_rank, config.lora_alpha = rank, rank * (lora.scale if lora else 1.0)
        config.max_cache_depth = 1
        config.authoritative_optimizer_grads = not self.adds
        return config

    def run(self, inputs: Inputs, copy: int) -> tuple[torch.Tensor, Gradients]:
        out, dx, dweights = (torch.empty_like(t) for t in (inputs.x, inputs.x, inputs.weights))
        count, layer = torch.tensor([inputs.x.shape[0]], dtype=torch.int32), self.layers[copy]
        where = pointers(inputs.ids, inputs.weights, inputs.x, out)
        self.do(layer.forward_sft_task(count.data_ptr(), self.shape.top_k, *where, True))
        for gradient in self.gradients if self.adds else ():
            gradient.zero_()
        where = pointers(inputs.dout, dx, *self.gradients, dweights)
        frozen, accumulate = (0, 0, 0), False
        self.do(layer.backward_task(*where, *frozen, accumulate, 1.0))
        return out, Gradients(dx, dweights, dict(zip(FACTORS, self.gradients, strict=True)))


def _named(lora: ExpertLoraFactors | None) -> dict[str, torch.Tensor]:
    """All six, which it always has."""
    assert lora is not None
    return {name: own for name, own in zip(FACTORS, lora.tensors(), strict=True) if own is not None}


def _of_each(factor: torch.Tensor, num_experts: int) -> torch.Tensor:
    """In bf16, and one per expert where ours is shared: it knows no other."""
    own = factor.detach().to(torch.bfloat16)
    return own.expand(num_experts, *own.shape[-2:]).contiguous()
