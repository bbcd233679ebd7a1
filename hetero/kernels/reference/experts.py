"""The experts of a layer in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero.kernels.reference.rows import gated_activation


def experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    lora: Mapping[str, torch.Tensor] | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """gate_up [E, 2I, H], down [E, H, I], x [T, H], expert_ids and expert_weights [T, top_k] -> [T, H].

    `lora` maps the names of `ops.ExpertLoraFactors` to factors, shared (2-D) or per expert (3-D). Computed in
    the dtype of x, one (token, expert) pair after the other.
    """
    out = []
    for token in range(x.shape[0]):
        total = 0.0 * x[token]
        for j, expert in enumerate(expert_ids[token].tolist()):
            if expert < 0:
                continue
            part = _LoraOf(lora or {}, expert, scale)
            pre = gate_up[expert] @ x[token]
            if gate_up_bias is not None:
                pre = pre + gate_up_bias[expert]
            gate, up = pre.chunk(2)
            gate, up = gate + part("gate", x[token]), up + part("up", x[token])
            h = gated_activation(gate, up, activation, limit, alpha)
            y = down[expert] @ h + part("down", h)
            if down_bias is not None:
                y = y + down_bias[expert]
            total = total + expert_weights[token, j] * y
        out.append(total)
    return torch.stack(out) if out else x * 1


class _LoraOf:
    """The low-rank term of one projection of one expert; zero when there are no such factors."""

    def __init__(self, factors: Mapping[str, torch.Tensor], expert: int, scale: float) -> None:
        self.factors, self.expert, self.scale = factors, expert, scale

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor | float:
        if f"{name}_a" not in self.factors:
            return 0.0
        a, b = (self.factors[f"{name}_{side}"] for side in "ab")
        a = a[self.expert] if a.dim() == 3 else a
        b = b[self.expert] if b.dim() == 3 else b
        return self.scale * (b @ (a @ x))
