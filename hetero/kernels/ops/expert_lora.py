"""ExpertLoraFactors: trainable low-rank factors of the experts of a layer, and their packed copies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hetero.errors import ShapeError
from hetero.kernels.cpu.experts import PackedExpertLora, PackedExperts
from hetero.kernels.cpu.packed import PackedWeight, pack, padded
from hetero.kernels.cpu.runs import Runs

FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
"""Names of the factors, in the order of every list of them."""


@dataclass(slots=True, eq=False)
class ExpertLoraFactors:
    """y += scale * B (A x) on the gate, up and down projections of E experts of sizes H and I.

    The outer factors (gate_a, up_a, down_b) are either shared by all experts, gate_a, up_a [r, H] and down_b
    [H, r], or one per expert, [E, r, H] and [E, H, r]. The inner ones are one per expert: gate_b, up_b
    [E, I, r] and down_a [E, r, I]. All are fp32 parameters, on any device, computed with in bf16; their
    gradients are fp32. Both of a pair may be None; gate and up must agree in layout and rank.

    Attributes:
        scale: alpha / rank.
    """

    gate_a: torch.Tensor | None = None
    gate_b: torch.Tensor | None = None
    up_a: torch.Tensor | None = None
    up_b: torch.Tensor | None = None
    down_a: torch.Tensor | None = None
    down_b: torch.Tensor | None = None
    scale: float = 1.0
    _key: object = field(default=None, init=False, repr=False)
    _packed: PackedExpertLora | None = field(default=None, init=False, repr=False)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The factors in the order of `FACTORS`."""
        return (self.gate_a, self.gate_b, self.up_a, self.up_b, self.down_a, self.down_b)

    def packed(self, experts: PackedExperts) -> PackedExpertLora | None:
        """The packed copies for `experts`, made anew when a factor has been written in place; None when there
        are no factors at all. Rollout and training use the same copies."""
        tensors = self.tensors()
        key = self._key_for(experts)
        if self._packed is None or key != self._key:
            if all(t is None for t in tensors):
                return None
            self._check(experts)
            gate_up_a, gate_up_b = self._pack_gate_up(experts)
            down_a, down_b = (None if t is None else pack(t.detach().cpu()) for t in tensors[4:])
            self._packed = PackedExpertLora(experts, gate_up_a, gate_up_b, down_a, down_b, self.scale)
            self._key = key
        return self._packed

    def frozen(self, experts: PackedExperts) -> ExpertLoraFactors:
        """A copy that stays as it is when the factors change, without gradient; in bf16 on the CPU."""
        copy = ExpertLoraFactors(scale=self.scale)
        for name, own in zip(FACTORS, self.tensors(), strict=True):
            setattr(copy, name, None if own is None else own.detach().to("cpu", torch.bfloat16, copy=True))
        copy._packed, copy._key = self.packed(experts), copy._key_for(experts)
        return copy

    def _key_for(self, experts: PackedExperts) -> object:
        tensors = [(t.data_ptr(), t._version) for t in self.tensors() if t is not None]
        return (id(experts), self.scale, *tensors)

    def _pack_gate_up(self, experts: PackedExperts) -> tuple[PackedWeight | None, PackedWeight | None]:
        pairs = ((self.gate_a, self.gate_b), (self.up_a, self.up_b))
        some_a, some_b = next(((a, b) for a, b in pairs if a is not None and b is not None), (None, None))
        if some_a is None or some_b is None:
            return None, None
        rank, size = some_b.shape[-1], experts.intermediate
        a = torch.zeros(*some_a.shape[:-2], 2 * padded(rank), experts.hidden)
        b = torch.zeros(experts.num_experts, 2 * size, rank)
        for half, (own_a, own_b) in enumerate(pairs):
            if own_a is None or own_b is None:
                continue
            first = half * padded(rank)
            a[..., first : first + rank, :] = own_a.detach()
            b[:, half * size : (half + 1) * size] = own_b.detach()
        return pack(a), pack(b, parts=2)

    def _check(self, experts: PackedExperts) -> None:
        e, h, i = experts.num_experts, experts.hidden, experts.intermediate
        ranks = {}
        for name, rows, columns in (("gate", i, h), ("up", i, h), ("down", h, i)):
            a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
            if a is None and b is None:
                continue
            if a is None or b is None:
                raise ShapeError(f"{name}_a and {name}_b must both be given or both be None")
            r = a.shape[-2]
            outer, inner = ((e, h, r), (e, r, i)) if name == "down" else ((e, r, h), (e, i, r))
            got = (b.shape, a.shape) if name == "down" else (a.shape, b.shape)
            if got[0] not in (outer, outer[1:]) or got[1] != inner:
                raise ShapeError(
                    f"{name}_a is {list(a.shape)} and {name}_b {list(b.shape)}; expected [r, {columns}] and "
                    f"[{rows}, r], each for {e} experts (the one on the hidden side may be shared)"
                )
            ranks[name] = a.shape[:-1] if name != "down" else ()
        if "gate" in ranks and "up" in ranks and ranks["gate"] != ranks["up"]:
            raise ShapeError(
                f"gate_a is {list(ranks['gate'])} x {h} and up_a {list(ranks['up'])} x {h}; gate and up must "
                "have one rank and one layout"
            )


def packed_expert_lora(
    lora: ExpertLoraFactors | Runs[ExpertLoraFactors] | None, experts: PackedExperts
) -> PackedExpertLora | Runs[PackedExpertLora] | None:
    """What the kernels take."""
    if isinstance(lora, Runs):
        return Runs(tuple(None if part is None else part.packed(experts) for part in lora.parts), lora.ends)
    return None if lora is None else lora.packed(experts)
