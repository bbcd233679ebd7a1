"""Whether the base weights are still what they were, a part of them at a time."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from hetero.models.hashing import base_tensors

CHECKS_PER_ROUND = 32
"""Checks after which every byte has been read: of 16 GB each check reads 0.5 GB, some tenths of a second."""
_CHUNK = 4 << 20
"""Bytes that have a checksum of their own."""


class BaseWatch:
    """Compares checksums of the base weights, packed experts included, with those of the round before.

    Training never writes to them; what does is a bug, or broken memory. A byte is watched from the first time
    that it was read. `base_hash` is the digest of all of them at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._chunks: list[tuple[Tensor, int, int]] = []
        for _, tensor in base_tensors(model):
            self._chunks += [
                (tensor.detach(), start, min(start + _CHUNK, tensor.nbytes))
                for start in range(0, tensor.nbytes, _CHUNK)
            ]
        self._known: dict[int, int] = {}
        self._next = 0
        self._num_changed = 0

    def check(self) -> bool:
        """Read the next part; False from the first change that was found on."""
        count = -(-len(self._chunks) // CHECKS_PER_ROUND)
        for _ in range(count):
            number = self._next
            crc = zlib.crc32(_bytes(*self._chunks[number]))
            self._num_changed += self._known.setdefault(number, crc) != crc
            self._next = (number + 1) % len(self._chunks)
        return self._num_changed == 0


def _bytes(tensor: Tensor, start: int, end: int) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8)[start:end].cpu().numpy())  # type: ignore[arg-type]
