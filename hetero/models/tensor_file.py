"""Write a safetensors file whose tensors are made one at a time: it may be larger than memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that is not there yet: its name and shape, and how to make it."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_tensor_file(
    path: Path, entries: Sequence[TensorEntry], dtype: torch.dtype, metadata: dict[str, str]
) -> str:
    """Write `entries`, cast to `dtype`, and return the sha256 of the file."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for entry in entries:
        start, end = end, end + math.prod(entry.shape) * dtype.itemsize
        header[entry.name] = {"dtype": _DTYPES[dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def put(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for entry in entries:
            tensor = entry.make().detach().to("cpu", dtype).contiguous()
            if tuple(tensor.shape) != entry.shape:
                raise AssertionError(
                    f"{entry.name} was announced as {entry.shape} but is {tuple(tensor.shape)}"
                )
            put(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
