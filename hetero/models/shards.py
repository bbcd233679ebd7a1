"""Write a checkpoint as safetensors shards while its tensors are being made."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 512 * 1024**2


class ShardWriter:
    """Collects tensors and writes a shard whenever `shard_bytes` are waiting: peak memory is one shard.

    `finish()` gives the files their final names and writes the index that Transformers reads.
    """

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = directory
        self.shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue one tensor. It must not share memory with another: safetensors refuses that."""
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= self.shard_bytes:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _path(self, index: int) -> Path:
        return self.directory / f"shard-{index}.safetensors"

    def finish(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self.directory / "model.safetensors")
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._path(index).rename(self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        document = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(document, indent=1))
