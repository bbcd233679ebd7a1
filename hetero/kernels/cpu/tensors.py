"""Checks of the tensors that go to the extension by address."""

from __future__ import annotations

import torch

from hetero.errors import ShapeError


def is_bf16(name: str, x: torch.Tensor) -> bool:
    """Whether x is bf16 (True) or fp32 (False). Raises ShapeError when it is neither, or not on the CPU."""
    if not x.is_cpu:
        raise ShapeError(f"{name} is on {x.device}; this operation runs on the CPU: pass {name}.cpu()")
    if x.dtype is torch.bfloat16:
        return True
    if x.dtype is torch.float32:
        return False
    raise ShapeError(f"{name} is {x.dtype}; expected bfloat16 or float32")


def expect(
    name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """x, contiguous. Raises ShapeError unless it is on the CPU and has this dtype (and shape)."""
    if not x.is_cpu:
        raise ShapeError(f"{name} is on {x.device}; this operation runs on the CPU: pass {name}.cpu()")
    if x.dtype is not dtype:
        raise ShapeError(f"{name} is {x.dtype}; expected {dtype}")
    if shape is not None and x.shape != shape:
        raise ShapeError(f"{name} has shape {list(x.shape)}; expected {list(shape)}")
    return x.contiguous()


def like(name: str, x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """x, contiguous, in the dtype of `reference`. Raises ShapeError unless shape and device agree."""
    if x.shape != reference.shape or x.device != reference.device:
        raise ShapeError(
            f"{name} has shape {list(x.shape)} on {x.device}; "
            f"expected {list(reference.shape)} on {reference.device}"
        )
    return x.to(reference.dtype).contiguous()
