"""AdamW on fp32 masters whose every bit is independent of the thread count, and the global gradient norm.

Both walk the parameters in a fixed order. The update is built from operations that round once (multiply,
add, divide, square root), never from fused forms such as addcmul or lerp: a fused form may round
differently in the vector body and in the scalar tail of a loop, and the number of threads decides where the
tails are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from hetero.errors import ArgumentError, CheckpointError, ModelError

_UPDATE_CHUNK = 1 << 16
"""Elements updated at a time: master, both moments, gradient and two scratch rows stay in the second-level
cache.
"""

_NORM_CHUNK = 1 << 14
"""Elements summed at a time. Below PyTorch's own threshold (32768) a reduction never splits over threads."""


class AdamW:
    """Decoupled weight decay Adam (Loshchilov and Hutter, arXiv 1711.05101), dense: a parameter whose
    gradient is zero, such as an expert no token visited, still has its moments decayed and follows its
    momentum.

    Attributes: `params` name -> fp32 Parameter, in the order of every reduction; `updates` the number of
        updates applied, which is Adam's t.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(f"betas are {betas}; expected two numbers in [0, 1)")
        if eps <= 0 or weight_decay < 0:
            raise ArgumentError(
                f"eps is {eps} and weight_decay {weight_decay}; expected eps > 0 and weight_decay >= 0"
            )
        for name, param in params.items():
            if param.dtype != torch.float32 or not param.is_contiguous():
                raise ModelError(
                    f"{name} is {param.dtype} and contiguous={param.is_contiguous()}; masters are fp32"
                )
        self.params = dict(params)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.updates = 0
        self._exp_avg = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.params.items()}
        self._exp_avg_sq = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.params.items()}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float = 1.0) -> float:
        """One update with `grad_scale * param.grad`; a parameter without gradient counts as gradient zero.

        Returns the Euclidean norm of the change of all parameters.
        """
        self.updates += 1
        squares: list[Tensor] = []
        for name, param in self.params.items():
            grad = param.grad if param.grad is not None else torch.zeros_like(param)
            p, g = param.view(-1), grad.view(-1)
            m, v = self._exp_avg[name].view(-1), self._exp_avg_sq[name].view(-1)
            scratch = torch.empty(2, min(_UPDATE_CHUNK, len(p)), device=p.device)
            for start in range(0, len(p), _UPDATE_CHUNK):
                at = slice(start, min(start + _UPDATE_CHUNK, len(p)))
                moved = self._update(
                    p[at], g[at], m[at], v[at], scratch[:, : at.stop - start], lr, grad_scale
                )
                squares += [piece.sum(dtype=torch.float64).cpu() for piece in moved.split(_NORM_CHUNK)]
        return math.sqrt(math.fsum(torch.stack(squares).tolist())) if squares else 0.0

    def _update(
        self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, scratch: Tensor, lr: float, grad_scale: float
    ) -> Tensor:
        """Master, gradient, moments: flat fp32 [n]; scratch [2, n]. Returns the squares of the change, [n] in
        scratch."""
        beta1, beta2 = self.betas
        a, b = scratch[0], scratch[1]
        torch.mul(g, grad_scale, out=a)
        torch.mul(a, 1.0 - beta1, out=b)
        m.mul_(beta1).add_(b)
        torch.mul(a, a, out=b)
        b.mul_(1.0 - beta2)
        v.mul_(beta2).add_(b)
        torch.div(v, 1.0 - beta2**self.updates, out=a)
        a.sqrt_().add_(self.eps)
        torch.mul(m, lr / (1.0 - beta1**self.updates), out=b)
        b.div_(a)
        a.copy_(p)
        if self.weight_decay:
            p.mul_(1.0 - lr * self.weight_decay)
        p.sub_(b)
        return a.sub_(p).square_()

    def state_dict(self) -> dict[str, Tensor]:
        """Both moments by parameter name. Live tensors: copy them to keep them over a step."""
        state = {f"exp_avg.{name}": tensor for name, tensor in self._exp_avg.items()}
        return state | {f"exp_avg_sq.{name}": tensor for name, tensor in self._exp_avg_sq.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Copy both moments back; `updates` as saved. Raises CheckpointError when names or shapes differ."""
        copy_exactly(self.state_dict(), state, "optimizer state")
        self.updates = updates


@torch.no_grad()
def copy_exactly(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], what: str) -> None:
    """Copy by name. Raises CheckpointError unless names, shapes and dtypes agree; then nothing is copied."""
    if targets.keys() != sources.keys():
        missing, extra = sorted(targets.keys() - sources.keys()), sorted(sources.keys() - targets.keys())
        raise CheckpointError(
            f"the {what} does not fit this model: missing {missing[:3]} ({len(missing)} in all), unexpected "
            f"{extra[:3]} ({len(extra)} in all). Resume with the model and lora sections of the checkpoint."
        )
    for name, target in targets.items():
        source = sources[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"the {what} has {name} as {tuple(source.shape)} {source.dtype}, this model as "
                f"{tuple(target.shape)} {target.dtype}. Resume with the lora section of the checkpoint."
            )
    for name, target in targets.items():
        target.copy_(sources[name])


@torch.no_grad()
def gradient_norm(params: Mapping[str, Parameter]) -> float:
    """Euclidean norm over all gradients, in fp64 and in a fixed order; inf or nan when any element is."""
    total = 0.0
    for param in params.values():
        if param.grad is None:
            continue
        flat = param.grad.view(-1)
        sums = [chunk.double().square_().sum() for chunk in flat.split(_NORM_CHUNK)]
        total += math.fsum(torch.stack(sums).tolist()) if flat.is_cuda else math.fsum(float(s) for s in sums)
    return math.sqrt(total)
