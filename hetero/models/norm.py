"""RMS norms through the exact kernel, where a probe shows that the formula is the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

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


def exact_norm(module: nn.Module) -> HeteroRMSNorm | None:
    """The exact twin of an RMS norm module, or None when `module` is something else."""
    weight = getattr(module, "weight", None)
    only_weight = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.buffers())
    if (
        "rmsnorm" not in type(module).__name__.lower()
        or not only_weight
        or not isinstance(weight, nn.Parameter)
    ):
        return None
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None
    )
    if eps is None or weight.ndim != 1:
        return None
    for offset in (0.0, 1.0):
        if _agrees(module, weight, float(eps), offset):
            return HeteroRMSNorm(weight, float(eps), offset, _rounds_first(module, weight.shape[0], offset))
    return None


def _twin(module: nn.Module, weight: Tensor) -> nn.Module:
    twin = copy.deepcopy(module).to("cpu")
    twin.weight = nn.Parameter(weight, requires_grad=False)
    return twin


@torch.no_grad()
def _agrees(module: nn.Module, weight: Tensor, eps: float, offset: float) -> bool:
    """Whether the module computes the formula in fp32, over rows of small, ordinary and large values."""
    generator = torch.Generator().manual_seed(0)
    size = weight.shape[0]
    x = torch.randn(3, size, generator=generator) * torch.tensor([[1e-3], [1.0], [1e3]])
    w = torch.randn(size, generator=generator)
    want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * (offset + w.double())
    try:
        got = _twin(module, w)(x)
    except (TypeError, RuntimeError):
        return False
    return isinstance(got, Tensor) and torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _rounds_first(module: nn.Module, size: int, offset: float) -> bool:
    """Whether the module rounds to bf16 before it multiplies by the weight: it then returns what rounding
    twice gives."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, size, generator=generator).bfloat16()
    w = (torch.randn(size, generator=generator) + 1.0 - offset).bfloat16()
    got = _twin(module, w)(x)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))
    scale = offset + w.float()
    twice = (wide.bfloat16().float() * scale).bfloat16()
    once = (wide * scale).bfloat16()
    return int((got != twice).sum()) < int((got != once).sum())
