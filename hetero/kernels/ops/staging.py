"""Copies between a GPU and pinned host memory, around kernels that run on the CPU."""

from __future__ import annotations

import torch


def to_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors' values in CPU memory, ready to be read; CPU tensors are passed through.

    All copies are queued on the current stream, behind the kernels that make the values, and waited for once.
    """
    copies = []
    streams = {tensor.device for tensor in tensors if tensor.is_cuda}
    for tensor in tensors:
        if not tensor.is_cuda:
            copies.append(tensor)
            continue
        with torch.cuda.device(tensor.device):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(pinned.copy_(tensor.detach(), non_blocking=True))
    for device in streams:
        torch.cuda.current_stream(device).synchronize()
    return tuple(copies)


def from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, queued on its current stream; the host memory may be dropped at once (a pinned
    block is reused only after the copy has run)."""
    if device.type != "cuda":
        return tensor
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    with torch.cuda.device(device):
        return pinned.to(device, non_blocking=True)
