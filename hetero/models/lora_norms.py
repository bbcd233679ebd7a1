"""How large an adapter is, and how much it changes its base."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hetero.kernels import ops
from hetero.models.adapter_state import Factors, adapter_of


@torch.no_grad()
def adapter_norms(model: nn.Module) -> dict[str, float]:
    """Two Frobenius norms over the whole adapter, from its fp32 masters; both 0 without one.

    lora/delta_norm: of scale * B A over all adapted matrices, that is of what would be added to the base. No
    such matrix is built: |B A|^2 is the sum over (B^T B) * (A A^T), both [r, r]. lora/ab_norm: of all
    factors A and B.
    """
    delta = own = 0.0
    for factors in adapter_of(model).factors.values():
        for a, b in _pairs(factors):
            aa, bb = a @ a.mT, b.mT @ b
            delta += factors.scale**2 * float((aa.double() * bb.double()).sum())
            own += sum(float(gram.diagonal(dim1=-2, dim2=-1).double().sum()) for gram in (aa, bb))
    return {"lora/delta_norm": math.sqrt(max(delta, 0.0)), "lora/ab_norm": math.sqrt(own)}


def _pairs(factors: Factors) -> Iterator[tuple[Tensor, Tensor]]:
    """A [.., r, K] and B [.., N, r] of each adapted matrix; a factor that experts share has no leading E."""
    if isinstance(factors, ops.LoraFactors):
        yield factors.a, factors.b
        return
    for part in ("gate", "up", "down"):
        a, b = getattr(factors, f"{part}_a"), getattr(factors, f"{part}_b")
        if a is not None and b is not None:
            yield a, b
