"""A source as the state dict that Transformers' loader takes: nothing is read before its turn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hetero.kernels.cpu import CodedWeight
from hetero.models.codings import CodedStack
from hetero.models.source import TensorSource

EXPERTS = ".experts."
"""In the name of every routed expert's tensors: the only ones that are passed on in codes."""


class Codes:
    """A weight in codes on its way through Transformers' loader, which casts and moves what it reads."""

    def __init__(self, weight: CodedWeight | CodedStack) -> None:
        self.weight = weight

    def to(self, *args: Any, **kwargs: Any) -> Codes:
        """Itself: codes have neither a device nor a dtype to choose."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes in the file, about."""
        weight = self.weight
        return weight.nbytes if isinstance(weight, CodedStack) else weight.codes.nbytes


class LazyWeight:
    """Stands for a slice of a safetensors file: `[...]` reads the weight."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self._source, self._name = source, name

    def __getitem__(self, index: Any) -> Tensor | Codes:
        if EXPERTS not in self._name:
            return self._source.tensor(self._name)
        weight = self._source.weight(self._name)
        return weight if isinstance(weight, Tensor) else Codes(weight)


def lazy_state(source: TensorSource) -> dict[str, Any]:
    """Every weight of `source` by name, to be read when the loader comes to it."""
    return {name: LazyWeight(source, name) for name in source.names()}
