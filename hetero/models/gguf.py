"""Read a GGUF file as a Transformers checkpoint. Needs the `gguf` package (extra `hetero[gguf]`).

Only the container and the block formats come from that package; names, the rotary un-permutation, the config
and the tokenizer are ours (see `gguf_tokenizer` for why the tokenizer is not left to Transformers).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from hetero.errors import ModelError, UnavailableError
from hetero.experts.imported import GGUF_BLOCKS, gguf_codes
from hetero.formats import packing
from hetero.models.codings import Weight
from hetero.models.gguf_models import TOP_NAMES, gguf_model
from hetero.models.gguf_tokenizer import build_tokenizer

_FLOATS = ("F32", "F16", "BF16")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def gguf_package() -> Any:
    """The optional `gguf` package. Raises UnavailableError when it is not installed."""
    try:
        import gguf  # noqa: PLC0415  (optional third-party package)
    except ImportError as error:
        raise UnavailableError(
            "reading GGUF files needs the `gguf` package, which is not installed: pip install 'hetero[gguf]'"
        ) from error
    return gguf


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a weight lies: a tensor of the file, and the expert if the tensor holds all of them."""

    tensor: Any
    expert: int | None = None

    @property
    def kind(self) -> str:
        """Name of its type in GGUF, such as "Q4_0"."""
        return str(self.tensor.tensor_type.name)

    @property
    def data(self) -> Any:
        """Its values, or its blocks as bytes."""
        data = self.tensor.data
        return data if self.expert is None else data[self.expert]


class GgufSource:
    """A GGUF file (all its parts, where it is split), tensor by tensor, under the names of the original."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._package = gguf_package()
        self._readers = [self._open(part) for part in _parts(self.path)]
        architecture = str(self._field("general.architecture"))
        self._prefix = f"{architecture}."
        self._model = gguf_model(architecture, int(self._get("expert_count", 0)))
        self.origin = str(self._field("general.name", self.path.stem))
        self.license: str | None = self._field("general.license", None)
        self._entries: dict[str, _Entry] = {}
        for reader in self._readers:
            for tensor in reader.tensors:
                self._entries |= self._named(tensor)
        self.config: PreTrainedConfig = self._config()

    @property
    def experts(self) -> tuple[str, ...]:
        """Types of the experts' tensors, such as ("Q4_0", "Q4_1")."""
        return tuple(dict.fromkeys(e.kind for e in self._entries.values() if e.expert is not None))

    @property
    def unheld(self) -> tuple[str, ...]:
        """Those of them that no format here holds without a second rounding."""
        return tuple(kind for kind in self.experts if kind not in _FLOATS and kind.lower() not in GGUF_BLOCKS)

    def expert_bytes(self) -> int:
        """Bytes of all experts when packed in the formats of the file, in whole panels of 32."""
        total = 0
        for entry in self._entries.values():
            if entry.expert is not None:
                k, n, *_ = (-(-int(extent) // 32) * 32 for extent in entry.tensor.shape)
                total += packing("bf16" if entry.kind in _FLOATS else entry.kind.lower()).nbytes(n, k)
        return total

    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, dequantised to fp32."""
        entry = self._entries[name]
        values = self._package.quants.dequantize(entry.data, entry.tensor.tensor_type)
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))
        if self._model.rotated and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.config.num_attention_heads
            if name.endswith("k_proj.weight"):
                heads = self.config.num_key_value_heads or heads
            return _unpermute(tensor, heads)
        # llama.cpp drops the dimension of one of a linear layer with one output.
        return tensor[None] if name.endswith("shared_expert_gate.weight") else tensor

    def weight(self, name: str) -> Weight:
        entry = self._entries[name]
        kind = entry.kind.lower()
        if entry.expert is None or kind not in GGUF_BLOCKS:
            return self.tensor(name)
        return gguf_codes(torch.from_numpy(np.array(entry.data)), kind)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that the file describes. Raises ModelError for one that is not known."""
        return build_tokenizer(self._field, self.config.max_position_embeddings)

    def save_tokenizer(self, directory: Path) -> None:
        self.tokenizer().save_pretrained(directory)
        GenerationConfig(
            bos_token_id=self.config.bos_token_id,
            eos_token_id=self.config.eos_token_id,
            pad_token_id=self.config.pad_token_id,
        ).save_pretrained(directory)

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise ModelError(f"there is no GGUF file at {path}")
        try:
            return self._package.GGUFReader(path)
        except ValueError as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error

    def _field(self, key: str, *default: Any) -> Any:
        field = self._readers[0].get_field(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ModelError(
            f"{self.path} lacks the metadata key {key!r}; it was not written by a known converter"
        )

    def _get(self, key: str, *default: Any) -> Any:
        return self._field(self._prefix + key, *default)

    def _named(self, tensor: Any) -> dict[str, _Entry]:
        """The weights that a tensor of the file holds, by their names in Transformers' checkpoints."""
        base, _, suffix = tensor.name.rpartition(".")
        prefix, _, rest = base.partition(".")
        index, _, part = rest.partition(".")
        if base in TOP_NAMES and suffix == "weight":
            return {f"{TOP_NAMES[base]}.weight": _Entry(tensor)}
        known = self._model.layer if suffix == "weight" else self._model.biased
        if prefix == "blk" and suffix in ("weight", "bias") and part in known:
            return {f"model.layers.{index}.{self._model.layer[part]}.{suffix}": _Entry(tensor)}
        if prefix == "blk" and suffix == "weight" and part in self._model.experts:
            name = f"model.layers.{index}.{self._model.experts[part]}.weight"
            return {name.format(e): _Entry(tensor, e) for e in range(len(tensor.data))}
        raise ModelError(
            f"{self.path} has a tensor {tensor.name!r} that a plain {self._prefix[:-1]} has not (scaled "
            "rotary factors, biases, experts in another form ...), so the result would be wrong. Pass the "
            "original Transformers directory instead."
        )

    def _config(self) -> PreTrainedConfig:
        num_tokens = len(self._field("tokenizer.ggml.tokens"))
        specials = {
            f"{name}_token_id": self._field(f"tokenizer.ggml.{key}_token_id", None)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        try:
            config = self._model.read_config(
                self._get, num_tokens, "lm_head.weight" not in self._entries, specials
            )
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None
        config.dtype = torch.bfloat16
        return config


def gguf_models(directory: Path) -> list[str]:
    """Names of the GGUF files in `directory`, of a model in several parts the first."""
    found = []
    for path in sorted(directory.glob("*.gguf")):
        match = _PART.search(path.name)
        if match is None or int(match[1]) == 1:
            found.append(path.name)
    return found


def _parts(path: Path) -> list[Path]:
    """All files of a model that was split ("x-00001-of-00003.gguf"), in order."""
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a head: from GGUF's interleaved rotary pairs (x0 y0 x1 y1 ..) to halves (x0 x1 .. y0 y1 ..)."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
