"""Opens what a model is loaded from, whatever it is kept in, and hands it to Transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hetero.errors import HeteroError, ModelError
from hetero.formats import AUTO
from hetero.models.lazy import lazy_state
from hetero.models.source import TensorSource, drop_quantization, open_source, quantization_of

_CONFIG = ("revision", "token", "cache_dir", "trust_remote_code", "local_files_only", "subfolder")
_HUB = ("revision", "token", "cache_dir", "local_files_only")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint before its weights are read.

    Attributes:
        path: where it is: a directory, a file or a Hub id.
        config: of the model, without the quantization of the file.
        source: its weights where they come in codes; None leaves the files to Transformers.
    """

    path: str
    config: PreTrainedConfig
    source: TensorSource | None

    def load(self, **kwargs: Any) -> PreTrainedModel:
        """The model; kwargs as of `AutoModelForCausalLM.from_pretrained`.

        Raises: ModelError for files that are missing, damaged or of another shape, and for experts in codes
            that no format here holds, where none is asked for.
        """
        if self.source is None:
            with readable(self.path):
                model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                    self.path, config=self.config, **kwargs
                )
            return model
        unheld = getattr(self.source, "unheld", ())
        if unheld and kwargs["quantization_config"].experts == AUTO:
            raise ModelError(
                f"{self.path} holds experts as {', '.join(unheld)}, which no format here keeps as they are; "
                "name one to pack the decoded weights in, such as experts='int4'"
            )
        for name in _CONFIG:
            kwargs.pop(name, None)
        kind: Any = AutoModelForCausalLM._model_mapping[type(self.config)]
        with readable(self.path):
            state = lazy_state(self.source)
            model = kind.from_pretrained(None, config=self.config, state_dict=state, **kwargs)
        model._weight_conversions = None  # type: ignore[assignment]  # those of a plain checkpoint, which `save_pretrained` writes
        model.config._name_or_path = self.path
        with contextlib.suppress(OSError):  # a checkpoint need not have one
            model.generation_config = GenerationConfig.from_pretrained(self.path)
        return model


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn what Transformers and safetensors say about the files of `path` into a ModelError."""
    try:
        yield
    except HeteroError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"The model {path} cannot be loaded: {error} (looked in {Path.cwd()}). It takes a checkpoint "
            "directory with config.json and whole weight files, a GGUF file or a Hub id; compare sizes with "
            "where the files came from, and fetch what differs anew."
        ) from error


def open_checkpoint(path: str, **hf_kwargs: Any) -> Checkpoint:
    """Find out how `path` holds its weights: plain, in codes, or as GGUF.

    Args:
        hf_kwargs: of `from_pretrained`; those that say where the files are count here.

    Raises: ModelError when there is no such checkpoint, or one with a quantization that is not known.
    """
    hub = {name: hf_kwargs[name] for name in _HUB if name in hf_kwargs}
    if path.endswith(".gguf"):
        source = open_source(path)
        return Checkpoint(path, source.config, source)
    with readable(path):
        config = AutoConfig.from_pretrained(path, **{k: hf_kwargs[k] for k in _CONFIG if k in hf_kwargs})
    quantized = quantization_of(config) is not None
    opened = open_source(path, **hub) if quantized else None
    drop_quantization(config)
    return Checkpoint(path, config, opened)
