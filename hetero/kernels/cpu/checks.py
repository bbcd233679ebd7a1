"""Checks of tensors on their way into the extension."""

from __future__ import annotations

import torch

from hetero.errors import ShapeError


def expect(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype, device: str = "cpu"
) -> None:
    """Raise ShapeError unless the tensor has this shape (None: any extent), dtype and device."""
    got = tuple(tensor.shape)
    # Every operation of every layer comes through here: the cheap comparisons first, `device` only if needed.
    fits = got == shape or (
        len(got) == len(shape) and all(w is None or g == w for g, w in zip(got, shape, strict=True))
    )
    placed = tensor.is_cpu if device == "cpu" else tensor.device.type == device
    if fits and placed and (not dtypes or tensor.dtype in dtypes):
        return
    wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "any dtype"
    raise ShapeError(
        f"{name} is {list(got)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}; "
        f"expected [{wanted}] {kinds} on {device}"
    )


def as_bf16(x: torch.Tensor) -> torch.Tensor:
    """x as a contiguous bf16 tensor (rounded to nearest even); x itself when it already is one."""
    return x.to(torch.bfloat16).contiguous()


def checked(name: str, x: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> torch.Tensor:
    """x, contiguous, after `expect`: what may be passed by address."""
    expect(name, x, shape, *dtypes)
    return x.contiguous()


def is_bf16(name: str, x: torch.Tensor) -> bool:
    """Whether x is bf16 (True) or fp32 (False). Raises ShapeError when it is neither, or not on the CPU."""
    if not x.is_cpu:
        raise ShapeError(f"{name} is on {x.device}; this operation runs on the CPU: pass {name}.cpu()")
    if x.dtype is torch.bfloat16:
        return True
    if x.dtype is torch.float32:
        return False
    raise ShapeError(f"{name} is {x.dtype}; expected bfloat16 or float32")


def like(name: str, x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """x, contiguous, in the dtype of `reference`. Raises ShapeError unless shape and device agree."""
    if x.shape != reference.shape or x.device != reference.device:
        raise ShapeError(
            f"{name} has shape {list(x.shape)} on {x.device}; "
            f"expected {list(reference.shape)} on {reference.device}"
        )
    return x.to(reference.dtype).contiguous()
