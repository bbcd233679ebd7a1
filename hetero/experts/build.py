"""Turns a checkpoint's expert tensors, whole or expert by expert, into an `ExpertStore` without a second
copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero.errors import ModelError, ShapeError
from hetero.experts.stack import PackedStack
from hetero.experts.store import ExpertStore
from hetero.formats import BF16, Packing
from hetero.kernels.cpu import CodedWeight

PARTS = {"gate_up_proj": "gate_up", "down_proj": "down"}
"""Names of the fused weight tensors in Transformers, and ours."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How a checkpoint lays out the experts of one layer, and how they gate.

    Attributes:
        num_experts, hidden_size, intermediate_size: E, H, I.
        transposed: weights are [E, in, out] instead of [E, out, in].
        interleaved: gate and up rows alternate (g0, u0, g1, ...) instead of following each other.
        has_bias: `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, H] come with the weights.
        activation: kind of gated activation (see `hetero.kernels.ops.gated_activation`).
        limit, alpha: its clamp and slope, where the kind has them.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    transposed: bool = False
    interleaved: bool = False
    has_bias: bool = False
    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the checkpoint tensor called `name`."""
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        full = {
            "gate_up_proj": (e, h, 2 * i) if self.transposed else (e, 2 * i, h),
            "down_proj": (e, i, h) if self.transposed else (e, h, i),
            "gate_up_proj_bias": (e, 2 * i),
            "down_proj_bias": (e, h),
        }
        if name not in full:
            raise ModelError(f"experts tensor {name!r} is not one hetero knows: {', '.join(full)}")
        return full[name]

    def unpack(self, store: ExpertStore) -> dict[str, Tensor]:
        """The checkpoint tensors that `store` was built from, bf16 weights and fp32 biases, by name."""
        gate_up, down = store.dequantize()
        tensors = {"gate_up_proj": gate_up, "down_proj": down}
        if store.gate_up_bias is not None and store.down_bias is not None:
            tensors |= {"gate_up_proj_bias": store.gate_up_bias, "down_proj_bias": store.down_bias}
        if self.interleaved:
            for name in ("gate_up_proj", "gate_up_proj_bias"):
                if name in tensors:
                    tensors[name] = tensors[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if self.transposed:
            tensors |= {name: tensors[name].mT.contiguous() for name in PARTS}
        return tensors


class StoreBuilder:
    """Packs tensors of one layer's experts as they arrive; holds at most one unpacked expert of its own.

    Args:
        packing: how to pack; None keeps codes in the format that they come in.
    """

    def __init__(self, layout: ExpertLayout, packing: Packing | None = BF16) -> None:
        e, h, i = layout.num_experts, layout.hidden_size, layout.intermediate_size
        self.layout = layout
        self.stacks = {
            "gate_up": PackedStack(e, 2 * i, h, packing, parts=2),
            "down": PackedStack(e, h, i, packing),
        }
        self.biases: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a whole plain tensor in the checkpoint's layout, by its Transformers name.

        Raises: ShapeError.
        """
        if tuple(tensor.shape) != self.layout.shape(name):
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {self.layout.shape(name)}")
        if name.endswith("_bias"):
            fixed = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], 1) if self._alternates(name) else tensor
            self.biases[name] = fixed.to("cpu", torch.float32).contiguous()
            return
        for e, weight in enumerate(tensor):
            self.add_expert(name, e, weight)

    def add_expert(self, name: str, index: int, *pieces: Tensor | CodedWeight) -> None:
        """Take the weight of one expert: a slice of what `add` takes, or for gate_up its gate and its up.

        Codes come as [out, in], whatever the layout.

        Raises: ShapeError.
        """
        stack = self.stacks[PARTS[name]]
        rows = [p.mT if self.layout.transposed and isinstance(p, Tensor) else p for p in pieces]
        _, *want = self.layout.shape(name)
        n, k = reversed(want) if self.layout.transposed else want
        if any(row.ndim != 2 or row.shape[1] != k for row in rows) or sum(row.shape[0] for row in rows) != n:
            got = " and ".join(str(tuple(row.shape)) for row in rows)
            raise ShapeError(f"{name} of expert {index} has shape {got} [out, in], expected {(n, k)}")
        if len(rows) == 1 and self._alternates(name):
            stack.put_parts(index, [_every_second(rows[0], first) for first in (0, 1)])
        elif len(rows) == 1:
            stack.put(index, rows[0])
        else:
            stack.put_parts(index, rows)

    def finish(self) -> ExpertStore:
        """The store. Raises ModelError when tensors are missing."""
        missing = list(self._missing())
        if missing:
            raise ModelError(f"the checkpoint lacks expert tensors: {', '.join(missing)}")
        return ExpertStore(
            self.stacks["gate_up"].packed,
            self.stacks["down"].packed,
            activation=self.layout.activation,
            limit=self.layout.limit,
            alpha=self.layout.alpha,
            gate_up_bias=self.biases.get("gate_up_proj_bias"),
            down_bias=self.biases.get("down_proj_bias"),
        )

    def _alternates(self, name: str) -> bool:
        return self.layout.interleaved and name.startswith("gate_up")

    def _missing(self) -> Iterator[str]:
        for name, part in PARTS.items():
            gaps = self.stacks[part].missing()
            if gaps:
                yield f"{name} (experts {', '.join(map(str, gaps[:8]))}{', ...' if len(gaps) > 8 else ''})"
            if self.layout.has_bias and f"{name}_bias" not in self.biases:
                yield f"{name}_bias"


def _every_second(weight: Tensor | CodedWeight, first: int) -> Tensor | CodedWeight:
    """Of rows g0, u0, g1, u1, ... the gates (first = 0) or the ups (1)."""
    return weight[first::2] if isinstance(weight, Tensor) else weight.every_second(first)
