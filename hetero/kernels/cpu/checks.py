"""Checks of tensors on their way into the extension."""

from __future__ import annotations

import torch

from hetero.errors import ShapeError


def expect(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype, device: str = "cpu"
) -> None:
    """Raise ShapeError unless the tensor has this shape (None: any extent), dtype and device."""
    got = tuple(tensor.shape)
    fits = len(got) == len(shape) and all(w is None or g == w for g, w in zip(got, shape, strict=True))
    if fits and (not dtypes or tensor.dtype in dtypes) and tensor.device.type == device:
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
