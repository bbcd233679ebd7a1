"""The peer: plain PyTorch on the same weights and inputs: oneDNN for bf16, with AMX where there is any."""

from __future__ import annotations

import torch
from torch.nn import functional

from hetero.bench.moe_check import Expected, Inputs
from hetero.bench.moe_layers import Loras, Weights
from hetero.bench.timing import check
from hetero.kernels.ops import ExpertLoraFactors
from hetero.kernels.ops.expert_lora import FACTORS
from hetero.kernels.reference import gated_activation


class Experts:
    """One matrix product per expert and projection, as Transformers' eager experts do it."""

    PAUSE = 0.02

    def __init__(self, weights: Weights, loras: Loras, dtype: torch.dtype, backward: bool) -> None:
        self.shape, self.weights, self.loras = weights.shape, weights, loras
        self.dtype, self.backward = dtype, backward
        self.layers = [(weights.gate_up.to(dtype), weights.down.to(dtype))]
        self.layers += [
            (weights.gate_up.to(dtype, copy=True), weights.down.to(dtype, copy=True)) for _ in loras[1:]
        ]

    def run(self, inputs: Inputs, copy: int) -> None:
        """Forward; backward to x, to the experts' weights and to the factors."""
        if not self.backward:
            self._infer(inputs, copy)
            return
        x = inputs.x.to(self.dtype).detach().requires_grad_()
        weights = inputs.weights.detach().requires_grad_()
        clear_gradients(self.loras[copy])
        self._forward(inputs, x, weights, copy).backward(inputs.dout.to(self.dtype))

    def check(self, inputs: Inputs, expected: Expected) -> None:
        """The peer must compute the same layer. Raises WrongResultError."""
        out = self._infer(inputs, 0)
        check("PyTorch's own output", out[expected.rows], expected.out, tolerance=0.05)

    def _infer(self, inputs: Inputs, copy: int) -> torch.Tensor:
        with torch.no_grad():
            return self._forward(inputs, inputs.x.to(self.dtype), inputs.weights, copy)

    def _forward(self, inputs: Inputs, x: torch.Tensor, weights: torch.Tensor, copy: int) -> torch.Tensor:
        gate_up, down = self.layers[copy]
        low_rank = _LowRank(self.loras[copy], self.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32)
        order = inputs.ids.flatten().argsort(stable=True)
        experts, counts = inputs.ids.flatten()[order].unique_consecutive(return_counts=True)
        pairs = order.split(counts.tolist())
        for expert, pair in zip(experts.tolist(), pairs, strict=True):
            rows = pair // self.shape.top_k
            own = x[rows]
            pre = functional.linear(own, gate_up[expert], self._bias("gate_up_bias", expert))
            gate, up = pre.chunk(2, dim=-1)
            h = self._activate(gate + low_rank("gate", own, expert), up + low_rank("up", own, expert))
            y = functional.linear(h, down[expert], self._bias("down_bias", expert))
            y = y + low_rank("down", h, expert)
            out = out.index_add(0, rows, y.float() * weights.flatten()[pair, None])
        return out.to(x.dtype)

    def _bias(self, name: str, expert: int) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(self.weights, name)
        return None if bias is None else bias[expert].to(self.dtype)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.shape.activation == "silu" and self.shape.limit is None:
            return functional.silu(gate) * up
        return gated_activation(gate, up, self.shape.activation, self.shape.limit)


class _LowRank:
    """The low-rank term of a projection; 0 without factors."""

    def __init__(self, lora: ExpertLoraFactors | None, dtype: torch.dtype) -> None:
        tensors = () if lora is None else zip(FACTORS, lora.tensors(), strict=True)
        self.factors = {name: f.to(dtype) for name, f in tensors if f is not None}
        self.scale = 1.0 if lora is None else lora.scale

    def __call__(self, name: str, x: torch.Tensor, expert: int) -> torch.Tensor | float:
        if f"{name}_a" not in self.factors:
            return 0.0
        a, b = (self.factors[f"{name}_{side}"] for side in "ab")
        a, b = (f[expert] if f.ndim == 3 else f for f in (a, b))
        return self.scale * functional.linear(functional.linear(x, a), b)


def clear_gradients(lora: ExpertLoraFactors | None) -> None:
    """Forget the factors' gradients, so that backward writes them rather than adds to them."""
    for factor in () if lora is None else lora.tensors():
        if factor is not None:
            factor.grad = None
