"""Opens what generates: model, adapter, tokenizer, chat rendering. Used by runs and by the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hetero.data.chat import ChatRenderer
from hetero.errors import ModelError
from hetero.kernels.cpu import Context, using
from hetero.models.adapter import load_adapter
from hetero.models.gguf import GgufSource
from hetero.models.load import load_model
from hetero.models.lora import LoraConfig, attach_lora
from hetero.models.quickstart import resolve_model
from hetero.recipe.sections.model import LoraSection, ModelSection


@dataclass(frozen=True)
class Opened:
    """A model in memory, with the tokenizer that speaks its language."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer


@contextlib.contextmanager
def opened(
    section: ModelSection,
    *,
    adapter: str | Path | None = None,
    chat: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> Iterator[Opened]:
    """Load a model, and an adapter onto it, for use inside the `with` block.

    On the CPU, PyTorch itself runs on one thread inside: what is left to it is small, and its waiting threads
    would take the cores from the kernels' pool. Raises ModelError, UnavailableError when something is
    missing.
    """
    path = resolve_model(section.path)
    tokenizer = _tokenizer(path, section.path)
    before = torch.get_num_threads()
    with using(Context(section.threads)):
        try:
            torch.set_num_threads(1)
            model = load_model(
                path,
                experts=section.experts,
                dense=section.dense,
                group_size=section.group_size,
                symmetric=section.symmetric,
                scale_search=section.scale_search,
                device=section.device,
            )
            if model.device.type != "cpu":
                torch.set_num_threads(before)
            if adapter is not None:
                load_adapter(model, Path(adapter))
            yield Opened(model, tokenizer, ChatRenderer(tokenizer, template=template, variables=chat))
        finally:
            torch.set_num_threads(before)


def prepare_adapter(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Put the adapter that is to be trained on a freshly opened model."""
    if section.start_from is not None:
        load_adapter(model, Path(section.start_from))
        return
    config = LoraConfig(
        rank=section.rank,
        alpha=section.alpha,
        targets=tuple(section.targets),
        expert_layout=section.expert_layout,
        expert_rank=section.expert_rank,
    )
    attach_lora(model, config, seed)


def _tokenizer(path: str, asked: str) -> PreTrainedTokenizerBase:
    if path.endswith(".gguf"):
        return GgufSource(path).tokenizer()
    directory = Path(path)
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} is no model: it has neither a config.json nor a GGUF file. "
            "model.path names a checkpoint."
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        if directory.exists():
            raise ModelError(f"The tokenizer of {path} cannot be loaded: {error}") from error
        raise ModelError(
            f"There is no model {asked!r}: no such directory (looked in {Path.cwd()}), and the "
            f"Hub does not give it: {str(error).splitlines()[0]}"
        ) from error
    if not tokenizer("a").input_ids:  # what Transformers makes of a directory without tokenizer files
        raise ModelError(
            f"{path} holds no tokenizer that knows any text. Put tokenizer.json and tokenizer_config.json of "
            "the model beside its weights."
        )
    return tokenizer
