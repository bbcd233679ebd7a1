"""Runs a module's own forward with its batch-dependent PyTorch functions replaced by exact kernels.

Routers and gates are a few lines of Python that differ by family: grouped top-k, sigmoid scores, correction
biases. They are kept as they are; only the functions whose bits depend on the batch are swapped
underneath.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hetero.kernels import ops
from hetero.kernels.cpu import PackedWeight, pack
from hetero.models.routing_site import TopK, selected

SUM_LIMIT = 64
"""Longest last axis that is summed by a chain of additions (top-k weights, group scores)."""

Handler = Callable[..., Any]


class FrozenMatrix:
    """A small frozen weight of any float dtype, packed as a sum of bf16 matrices: exact to 24 bits.

    A router in fp32 keeps its precision this way; one stored in bf16 takes a single part.
    """

    def __init__(self, weight: Tensor) -> None:
        self.version = weight._version
        self.parts: list[PackedWeight] = []
        rest = weight.detach().to("cpu", torch.float32)
        for _ in range(3):
            part = rest.bfloat16()
            self.parts.append(pack(part))
            rest = rest - part.float()
            if not bool(rest.any()):
                break

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] -> fp32 [..., N]."""
        out = ops.linear(x, self.parts[0], bias, out_dtype=torch.float32)
        for part in self.parts[1:]:
            out = out + ops.linear(x, part, out_dtype=torch.float32)
        return out


class ExactFunctions(TorchFunctionMode):
    """Routes linear, softmax, sigmoid, topk, silu, gelu and short sums of one module through the kernels.

    Args:
        wide: linears return fp32 (routers), else the dtype of their input.
    """

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.matrices: dict[int, FrozenMatrix] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SOURCES:
            out = func(*args, **kwargs)
            if isinstance(args[0], nn.Parameter) and out is not args[0]:
                out.hetero_source = args[0]
            return out
        handler = HANDLERS.get(func)
        out = NotImplemented if handler is None else handler(self, *args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def matrix(self, weight: Tensor) -> FrozenMatrix | None:
        """The packed form of a parameter (or of a dtype cast of one); None for any other tensor."""
        source = getattr(weight, "hetero_source", weight)
        if not isinstance(source, nn.Parameter) or source.ndim != 2 or source.requires_grad:
            return None
        found = self.matrices.get(id(source))
        if found is None or found.version != source._version:
            found = self.matrices[id(source)] = FrozenMatrix(source)
        return found


_SOURCES = {Tensor.to, Tensor.type, Tensor.float}


def _linear(mode: ExactFunctions, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    matrix = mode.matrix(weight)
    if matrix is None:
        return NotImplemented
    out = matrix.apply(x, None if bias is None else bias.float())
    return out if mode.wide else out.to(x.dtype)


def _softmax(
    mode: ExactFunctions, x: Tensor, dim: int | None = None, *_: Any, dtype: Any = None, **__: Any
) -> Any:
    if dim is None or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    return ops.softmax(x.float()).to(dtype or x.dtype)


def _topk(
    mode: ExactFunctions, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if dim % x.ndim != x.ndim - 1 or not largest or not x.is_floating_point():
        return NotImplemented
    found = selected(x, k, _best)
    return _best(x, k) if found is None else found


def _best(x: Tensor, k: int) -> TopK:
    return TopK(*ops.topk(x, k))


def _sum(
    mode: ExactFunctions, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    axis = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(axis, int) or not x.is_floating_point() or not 0 < x.shape[axis] <= SUM_LIMIT:
        return NotImplemented
    first, *others = (x if dtype is None else x.to(dtype)).unbind(axis)
    if not others:
        first = first.clone()  # a sum is never a view: Mixtral divides x by it in place
    for other in others:
        first = first + other
    return first.unsqueeze(axis) if keepdim else first


def _elementwise(kind: str, mode: ExactFunctions, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return ops.activation(x, kind)


def _gelu(mode: ExactFunctions, x: Tensor, *, approximate: str = "none") -> Tensor:
    return ops.activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")


_SIGMOID = partial(_elementwise, "sigmoid")
HANDLERS: dict[Any, Handler] = {
    functional.linear: _linear,
    functional.softmax: _softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    torch.topk: _topk,
    Tensor.topk: _topk,
    torch.sum: _sum,
    Tensor.sum: _sum,
    torch.sigmoid: _SIGMOID,
    Tensor.sigmoid: _SIGMOID,
    functional.sigmoid: _SIGMOID,
    functional.silu: partial(_elementwise, "silu"),
    functional.gelu: _gelu,
}


def run_exactly(module: nn.Module) -> None:
    """Make `module.forward` run under `ExactFunctions`, for good."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    mode = ExactFunctions(wide="weight" in own and type(module) is not nn.Linear)
    forward = module.forward

    @wraps(forward)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    module.forward = exact
