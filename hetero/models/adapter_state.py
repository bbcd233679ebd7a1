"""What is attached to a model: the modules that carry LoRA, their factors, and the versions that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from hetero.kernels import ops
from hetero.models.experts import HeteroExperts
from hetero.models.linear import HeteroLinear
from hetero.models.lora_linear import LoraLinear

Adaptable = HeteroLinear | LoraLinear | HeteroExperts
Factors: TypeAlias = "ops.LoraFactors | ops.ExpertLoraFactors"
RowFactors: TypeAlias = "ops.Runs[ops.LoraFactors] | ops.Runs[ops.ExpertLoraFactors]"


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that the optimiser has left behind.

    Attributes:
        number: what `adapter_version` said.
        key: see `version_key`.
        factors: name of a module -> its factors of that version, in the dtype they are computed with.
    """

    number: int
    key: str
    factors: dict[str, Factors]


@dataclass
class Adapter:
    """What is attached to a model.

    Attributes:
        version: how often the factors have changed.
        modules, factors: by the name of the module, in the order of installation.
        masters: every fp32 parameter among the factors.
        window: how many versions stay in memory, the current one among them.
        kept: the others, oldest first, by key.
        num_restored: versions that came from a checkpoint, so that no two have one key.
    """

    version: int = 0
    modules: dict[str, Adaptable] = field(default_factory=dict)
    factors: dict[str, Factors] = field(default_factory=dict)
    masters: list[nn.Parameter] = field(default_factory=list)
    window: int = 1
    kept: dict[str, KeptVersion] = field(default_factory=dict)
    num_restored: int = 0

    def trim(self) -> None:
        """Let go of the versions that have left the window."""
        for key in list(self.kept)[: max(0, len(self.kept) - (self.window - 1))]:
            del self.kept[key]


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter of `model`; an empty one when nothing is attached."""
    adapter: Adapter = model.__dict__.setdefault("_hetero_adapter", Adapter())
    return adapter


@contextmanager
def computing_with(model: nn.Module, factors: dict[str, Factors | RowFactors]) -> Iterator[None]:
    """Within this context every adapted module computes with what `factors` has for its name, or without."""
    modules = adapter_of(model).modules
    before = {name: module.lora for name, module in modules.items()}
    for name, module in modules.items():
        module.lora = factors.get(name)
    try:
        yield
    finally:
        for name, module in modules.items():
            module.lora = before[name]
