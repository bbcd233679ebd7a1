"""What a run of a whole model must do at least, counted at its modules while it runs once, untimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hetero.kernels.cpu import PackedWeight
from hetero.models.experts import HeteroExperts
from hetero.models.head import head
from hetero.models.linear import HeteroLinear


@dataclass(slots=True)
class ModelWork:
    """Sums over a run.

    Attributes:
        rows: tokens that went through each forward of the model, shared prompts once.
        bytes: weights read: of a linear all, of a layer of experts those that its tokens chose, once per
            step (and once more for backward); nothing for the cache of keys and values.
        flops: floating-point operations, two per multiply-add with these weights.
    """

    rows: list[int] = field(default_factory=list)
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, nbytes: float, flops: float) -> None:
        self.bytes += nbytes
        self.flops += flops


@contextmanager
def counting(model: Any, *, backward: bool, head_rows: int) -> Iterator[ModelWork]:
    """Count the forwards of `model` inside the block, each layer's once.

    Args:
        backward: whether every product is to be credited with a second one, its gradient of the input.
        head_rows: rows whose logits the run needs; the engine and the trainer call the head by themselves.
    """
    work = ModelWork()

    def enter(module: nn.Module, args: Any, out: Any) -> None:
        work.rows.append(args[0].numel())

    def linear(module: Any, args: Any, out: Any) -> None:
        work.add(module.packed.nbytes, 2.0 * out.numel() * module.in_features)

    def experts(module: Any, args: Any, out: Any) -> None:
        store, ids = module.store, args[1]
        chosen = ids[ids >= 0]
        one = 3.0 * store.hidden_size * store.intermediate_size
        work.add(
            chosen.unique().numel() * store.nbytes / store.num_experts,
            2.0 * one * chosen.numel(),
        )

    hooks = [model.get_input_embeddings().register_forward_hook(enter)]
    for module in model.modules():
        if isinstance(module, HeteroExperts):
            hooks.append(module.register_forward_hook(experts))
        elif isinstance(module, HeteroLinear):
            hooks.append(module.register_forward_hook(linear))
    try:
        yield work
    finally:
        for hook in hooks:
            hook.remove()
    weight = head(model).weight
    assert isinstance(weight, PackedWeight)
    work.add(len(work.rows) * weight.nbytes, 2.0 * head_rows * weight.n * weight.k)
    if backward:
        work.add(work.bytes, work.flops)
