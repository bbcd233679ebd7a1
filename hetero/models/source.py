"""Where converted weights come from: one tensor at a time, by its Transformers name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from hetero.errors import ModelError, UnavailableError
from hetero.models.codings import Weight, coding_of
from hetero.models.config import METHOD
from hetero.models.gguf import GgufSource

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class TensorSource(Protocol):
    """A checkpoint that hands out its tensors one by one, so that nothing is ever held whole in memory."""

    origin: str  # what to call it in a model card
    license: str | None  # SPDX-like id of the weights' licence, where the source states one

    @property
    def config(self) -> PreTrainedConfig: ...

    def names(self) -> list[str]:
        """Names of all tensors, in the Transformers convention of `config.model_type`."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor in the source's own floating dtype; codes come as bf16. KeyError without it."""
        ...

    def weight(self, name: str) -> Weight:
        """The same as it is stored: in codes where the source has them."""
        ...

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer, its chat template and the generation config into `directory`."""
        ...


class SafetensorsSource:
    """A Transformers checkpoint directory of one or more safetensors files."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "config.json").is_file():
            raise ModelError(
                f"{self.directory} is not a checkpoint directory: it has no config.json. Pass a directory "
                "written by save_pretrained, or a .gguf file."
            )
        self.config: PreTrainedConfig = AutoConfig.from_pretrained(self.directory)
        self.origin = str(getattr(self.config, "_name_or_path", "") or self.directory.name)
        self.license: str | None = None
        self._file_of = self._index()
        self._coding = coding_of(quantization_of(self.config))
        drop_quantization(self.config)  # tensors come decoded
        self._stored = self._coding.stored(self._file_of.keys())
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return weight_map
        if not (self.directory / "model.safetensors").is_file():
            raise ModelError(
                f"{self.directory} has no safetensors weights (model.safetensors or its index). Load it"
                "  with Transformers and save_pretrained it again."
            )
        with safe_open(self.directory / "model.safetensors", framework="pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")

    def names(self) -> list[str]:
        return list(self._stored)

    def tensor(self, name: str) -> Tensor:
        weight = self.weight(name)
        return weight if isinstance(weight, Tensor) else weight.dequantize()

    def weight(self, name: str) -> Weight:
        weight = self._coding.read([self._read(stored) for stored in self._stored[name]])
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize == 1:
            raise ModelError(f"{self.directory} holds {name} as {weight.dtype} without its scales")
        return weight

    def _read(self, name: str) -> Tensor:
        file_name = self._file_of[name]
        if file_name not in self._open:
            try:
                self._open[file_name] = safe_open(self.directory / file_name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {self.directory / file_name}: {error}") from error
        tensor: Tensor = self._open[file_name].get_tensor(name)
        return tensor

    def save_tokenizer(self, directory: Path) -> None:
        for name in _TOKENIZER_FILES:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint that comes in codes; None for plain weights.

    A checkpoint that hetero saved carries its own config, but its tensors are plain.
    """
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            as_dict: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
            return None if as_dict.get("quant_method") == METHOD else as_dict
    return None


def drop_quantization(config: Any) -> None:
    """Make `config` that of a plain checkpoint."""
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


def open_source(source: str | Path, **hub: Any) -> TensorSource:
    """Open a `.gguf` file, a Transformers directory or a model of the Hugging Face Hub, tensor by tensor.

    Args:
        hub: passed to the Hub: revision, token, cache_dir, local_files_only.

    Raises:
        ModelError: there is nothing readable at `source`.
        UnavailableError: `source` looks like a Hub id and the Hub does not give it.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return GgufSource(path)
    if path.exists() or not _HUB_ID.fullmatch(str(source)):
        return SafetensorsSource(path)
    try:
        directory = snapshot_download(
            str(source), allow_patterns=["*.safetensors*", *_TOKENIZER_FILES, "config.json"], **hub
        )
    except (OSError, ValueError) as error:  # every failure of the Hub client is one of these two
        raise UnavailableError(
            f"{source} is no directory here and the Hugging Face Hub gives nothing ({type(error).__name__}). "
            "Pass an existing directory or .gguf file, or download the model where there is a network."
        ) from error
    return SafetensorsSource(directory)
