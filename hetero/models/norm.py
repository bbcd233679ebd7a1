"""Norms through row-independent kernels, where a probe shows that the formula is the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetero.kernels import ops


class HeteroRMSNorm(nn.Module):
    """x / rms(x) * (offset + weight).

    Attributes:
        weight: [H] parameter, shared with the module it replaces.
        eps, offset: constants of the formula (Gemma keeps weight - 1, hence offset 1).
        round_first: round x / rms(x) to the dtype of x before the weight is applied (Llama's way).
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, round_first: bool) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self.round_first = round_first

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> like x."""
        return ops.rms_norm(x, self.weight, self.eps, self.offset, round_first=self.round_first)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, offset={self.offset}"


class HeteroLayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight (Cohere), by PyTorch's fused kernel, which takes each row alone."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> like x."""
        weight = self.weight.float()
        return functional.layer_norm(x.float(), weight.shape, weight, None, self.eps).to(x.dtype)


def exact_norm(module: nn.Module) -> nn.Module | None:
    """The row-independent twin of a norm module, or None when `module` is something else."""
    weight = getattr(module, "weight", None)
    only_weight = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.buffers())
    if "norm" not in type(module).__name__.lower() or not only_weight or not isinstance(weight, nn.Parameter):
        return None
    names = ("variance_epsilon", "eps", "epsilon")
    eps = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if eps is None or weight.ndim != 1:
        return None
    for offset in (0.0, 1.0):
        if _is_rms_norm(module, weight.shape[0], float(eps), offset):
            return HeteroRMSNorm(weight, float(eps), offset, _rounds_first(module, weight.shape[0], offset))
    return (
        HeteroLayerNorm(weight, float(eps)) if _is_layer_norm(module, weight.shape[0], float(eps)) else None
    )


def _samples(size: int) -> tuple[Tensor, Tensor]:
    """Rows of small, ordinary and large values [3, H], and a weight [H]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, size, generator=generator) * torch.tensor([[1e-3], [1.0], [1e3]]) + 0.1
    return x, torch.randn(size, generator=generator)


@torch.no_grad()
def _run(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor | None:
    """What the module makes of `x` with another weight; None when it cannot be called like a norm."""
    twin = copy.deepcopy(module).to("cpu")
    twin.weight = nn.Parameter(weight, requires_grad=False)
    try:
        got = twin(x)
    except Exception:  # whatever it wants, it is not a plain norm
        return None
    return got if isinstance(got, Tensor) and got.shape == x.shape else None


def _is_rms_norm(module: nn.Module, size: int, eps: float, offset: float) -> bool:
    x, weight = _samples(size)
    wide = x.double()
    want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.double())
    got = _run(module, x, weight)
    return got is not None and torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def _is_layer_norm(module: nn.Module, size: int, eps: float) -> bool:
    x, weight = _samples(size)
    want = functional.layer_norm(x.double(), (size,), weight.double(), None, eps)
    got = _run(module, x, weight)
    return got is not None and torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def _rounds_first(module: nn.Module, size: int, offset: float) -> bool:
    """Whether the module rounds to bf16 before it multiplies by the weight: it then returns what two
    roundings give."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, size, generator=generator).bfloat16()
    weight = (torch.randn(size, generator=generator) + 1.0 - offset).bfloat16()
    got = _run(module, x, weight)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))
    twice = (wide.bfloat16().float() * (offset + weight.float())).bfloat16()
    once = (wide * (offset + weight.float())).bfloat16()
    return got is not None and int((got != twice).sum()) < int((got != once).sum())
