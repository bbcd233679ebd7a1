"""Watches a model run once: which modules call functions that need exact kernels, and what stays inexact
after all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.models.exact import HANDLERS

ROW_INDEPENDENT = frozenset(
    """
    abs add alias any arange argmax argmin as_strided bitwise_and bitwise_not bitwise_or bitwise_xor bucketize
    cat ceil chunk clamp clamp_max clamp_min clone complex constant_pad_nd copy cumsum detach diff div
    embedding empty empty_like empty_strided eq equal expand eye fill flip floor floor_divide full full_like
    gather ge gt index index_add index_copy index_fill index_put index_select isfinite isin isinf isnan item
    le lift_fresh linspace local_scalar_dense logical_and logical_not logical_or logical_xor lt masked_fill
    masked_scatter max maximum min minimum mul native_layer_norm ne neg new_empty new_empty_strided new_full
    new_ones new_zeros nonzero one_hot ones ones_like permute reciprocal relu remainder repeat reshape
    resolve_conj rsqrt rsub scalar_tensor scatter scatter_add select select_scatter set_ slice slice_scatter
    sort split split_with_sizes sqrt squeeze stack sub t to_copy transpose tril triu unbind unfold
    unsafe_index unsafe_view unsqueeze view view_as_complex view_as_real where zero zeros zeros_like
    """.split()  # noqa: SIM905
)
"""ATen operations whose result for one row never depends on other rows: copies, and arithmetic that IEEE 754
rounds correctly one element at a time. Reductions, matrix products and functions from libm are not among
them."""


@contextmanager
def module_stack(root: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules whose forward is running, innermost last."""
    stack = [root]

    def enter(module: nn.Module, args: Any) -> None:
        stack.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    before = hooks.register_module_forward_pre_hook(enter)
    after = hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()


class _Callers(TorchFunctionMode):
    """Notes the modules that call one of the functions with an exact twin on floating-point tensors."""

    def __init__(self, stack: list[nn.Module]) -> None:
        super().__init__()
        self.stack = stack
        self.found: dict[nn.Module, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in HANDLERS and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.found[self.stack[-1]] = None
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Notes floating-point operations that are not known to be row-independent, with the module that runs
    them."""

    def __init__(self, stack: list[nn.Module]) -> None:
        super().__init__()
        self.stack = stack
        self.found: dict[tuple[str, nn.Module], None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name not in ROW_INDEPENDENT and not _is_square(name, args):
            first = out[0] if isinstance(out, (tuple, list)) and out else out
            if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
                self.found[(name, self.stack[-1])] = None
        return out


def _is_square(name: str, args: tuple[Any, ...]) -> bool:
    return name == "pow" and args[1] in (1, 2)


@torch.no_grad()
def callers(model: nn.Module, run: Callable[[], Any]) -> list[nn.Module]:
    """Modules of `model` that call functions with exact twins while `run` runs it."""
    with module_stack(model) as stack, _Callers(stack) as seen:
        run()
    return list(seen.found)


@torch.no_grad()
def inexact(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """What is not known to be row-independent while `run` runs `model`: "operation in module (Class)",
    sorted."""
    names = {module: name for name, module in model.named_modules()}
    with module_stack(model) as stack, _Operations(stack) as seen:
        run()
    return sorted(f"{op} in {names.get(m, '?') or 'the model'} ({type(m).__name__})" for op, m in seen.found)
