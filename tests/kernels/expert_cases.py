"""Random expert layers, their fp64 reference gradients, and comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero.experts import ExpertStore
from hetero.kernels import ops, reference


def bf16(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers that bf16 holds exactly, as fp32."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`; the norm of `got` when `want` is zero."""
    norm = want.double().norm()
    return float((got.double() - want.double()).norm() / (norm if norm > 0 else 1.0))


@dataclass
class Layer:
    """E experts of sizes H and I with everything that the reference needs."""

    e: int
    h: int
    i: int
    activation: str = "silu"
    biases: bool = False
    limit: float | None = None
    alpha: float | None = None
    seed: int = 0
    gate_up: Tensor = field(init=False)
    down: Tensor = field(init=False)
    gate_up_bias: Tensor | None = field(init=False, default=None)
    down_bias: Tensor | None = field(init=False, default=None)
    store: ExpertStore = field(init=False)

    def __post_init__(self) -> None:
        self.gate_up = bf16(self.e, 2 * self.i, self.h, scale=self.h**-0.5, seed=self.seed)
        self.down = bf16(self.e, self.h, self.i, scale=self.i**-0.5, seed=self.seed + 1)
        if self.biases:
            self.gate_up_bias = bf16(self.e, 2 * self.i, seed=self.seed + 2)
            self.down_bias = bf16(self.e, self.h, seed=self.seed + 3)
        self.store = ExpertStore.from_tensors(
            self.gate_up,
            self.down,
            activation=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            limit=self.limit,
            alpha=self.alpha,
        )

    def factors(
        self, rank: int, layout: str, names: tuple[str, ...] = ("gate", "up", "down")
    ) -> dict[str, Tensor]:
        """LoRA factors that need gradients. layout: "shared" or "per_expert"."""
        outer = (self.e,) if layout == "per_expert" else ()
        shapes = {
            "gate_a": (*outer, rank, self.h),
            "gate_b": (self.e, self.i, rank),
            "up_a": (*outer, rank, self.h),
            "up_b": (self.e, self.i, rank),
            "down_a": (self.e, rank, self.i),
            "down_b": (*outer, self.h, rank),
        }
        return {
            name: bf16(*shape, scale=(shape[-1] if name.endswith("a") else 4) ** -0.5, seed=index)
            for index, (name, shape) in enumerate(shapes.items())
            if name.split("_")[0] in names
        }


@dataclass
class Tokens:
    """x [T, H], ids and weights [T, K], and a gradient of the output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dout: Tensor

    @classmethod
    def random(cls, layer: Layer, t: int, k: int, seed: int = 0) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randperm(layer.e, generator=generator)[:k] for _ in range(t)])
        weights = torch.rand(t, k, generator=generator)
        return cls(bf16(t, layer.h, seed=seed + 10), ids, weights, bf16(t, layer.h, seed=seed + 11))


@dataclass
class Result:
    out: Tensor
    dx: Tensor
    dweights: Tensor
    dfactors: dict[str, Tensor]


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def run(
    layer: Layer,
    tokens: Tokens,
    factors: dict[str, Tensor] | None = None,
    scale: float = 0.5,
    keep: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Forward and backward through `ops.experts`."""
    x, weights = _leaves(tokens.x.to(dtype), tokens.weights)
    own = dict(zip(factors or {}, _leaves(*(factors or {}).values()), strict=True))
    lora = ops.ExpertLoraFactors(**own, scale=scale) if factors else None
    out = ops.experts(layer.store, x, tokens.ids, weights, lora, keep=keep)
    out.backward(tokens.dout.to(dtype))
    assert x.grad is not None
    assert weights.grad is not None
    dfactors = {name: factor.grad for name, factor in own.items() if factor.grad is not None}
    return Result(out.detach(), x.grad, weights.grad, dfactors)


def expected(
    layer: Layer, tokens: Tokens, factors: dict[str, Tensor] | None = None, scale: float = 0.5
) -> Result:
    """The same by autograd of the reference in fp64."""
    x, weights = _leaves(tokens.x.double(), tokens.weights.double())
    own = dict(zip(factors or {}, _leaves(*(f.double() for f in (factors or {}).values())), strict=True))
    wide = [None if b is None else b.double() for b in (layer.gate_up_bias, layer.down_bias)]
    out = reference.experts(
        layer.gate_up.double(),
        layer.down.double(),
        x,
        tokens.ids,
        weights,
        gate_up_bias=wide[0],
        down_bias=wide[1],
        activation=layer.activation,
        limit=layer.limit,
        alpha=layer.alpha,
        lora=own,
        scale=scale,
    )
    out.backward(tokens.dout.double())
    zeros = {name: torch.zeros_like(factor) for name, factor in own.items()}
    dfactors = {name: zeros[name] if f.grad is None else f.grad for name, f in own.items()}
    dx = torch.zeros_like(x) if x.grad is None else x.grad
    dweights = torch.zeros_like(weights) if weights.grad is None else weights.grad
    return Result(out.detach(), dx, dweights, dfactors)


def check(got: Result, want: Result, tolerance: float = 0.01) -> None:
    """Everything within `tolerance`, relative to its norm; the output within 0.6 %."""
    assert relative(got.out, want.out) < 0.006
    assert relative(got.dx, want.dx) < tolerance
    assert relative(got.dweights, want.dweights) < tolerance
    assert got.dfactors.keys() == want.dfactors.keys()
    for name, grad in want.dfactors.items():
        assert relative(got.dfactors[name], grad) < tolerance, name
