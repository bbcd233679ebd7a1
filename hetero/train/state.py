"""The trainer's state as files, and back to the bit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hetero.errors import CheckpointError
from hetero.models.lora import adapter_version, bump_adapter_version
from hetero.models.versions import kept_tensors, restore_versions
from hetero.train.checkpoint import verify_checkpoint, write_checkpoint
from hetero.train.optimizer import AdamW, copy_exactly
from hetero.train.random_state import get_random_state, set_random_state

MASTERS, MOMENTS, STATE = "masters.safetensors", "optimizer.safetensors", "trainer.json"
VERSION = "version-"
"""The file of a kept version is called so, with its number."""


@dataclass
class TrainerState:
    """Counters. step: optim_step calls, which the learning rate follows; the steps among them without an
    update; num_tokens: of all samples trained so far, prompts included.
    """

    step: int = 0
    empty_steps: int = 0
    nonfinite_steps: int = 0
    nonfinite_in_a_row: int = 0
    num_tokens: int = 0


def save_state(directory: str | Path, model: PreTrainedModel, optimizer: AdamW, state: TrainerState) -> Path:
    """Masters and moments fp32, kept versions as they are computed with, counters, adapter version and random
    streams, as one atomic checkpoint."""

    def write(target: Path) -> None:
        save_file({name: param.detach() for name, param in optimizer.params.items()}, target / MASTERS)
        for number, tensors in kept_tensors(model).items():
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / _kept(number))
        save_file(optimizer.state_dict(), target / MOMENTS)
        values = {
            "counters": asdict(state),
            "updates": optimizer.updates,
            "adapter_version": adapter_version(model),
            "random": get_random_state(),
        }
        (target / STATE).write_text(json.dumps(values))

    return write_checkpoint(directory, write)


def _kept(number: int | str) -> str:
    return f"{VERSION}{number}.safetensors"


def load_state(directory: str | Path, model: PreTrainedModel, optimizer: AdamW) -> TrainerState:
    """Raises CheckpointError, before anything is changed, when the checkpoint is damaged or does not fit."""
    source = verify_checkpoint(directory)
    try:
        values: dict[str, Any] = json.loads((source / STATE).read_text())
        state = TrainerState(**values["counters"])
        masters, moments = load_file(source / MASTERS), load_file(source / MOMENTS)
        kept = {int(path.stem.removeprefix(VERSION)): load_file(path) for path in source.glob(_kept("*"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source} is not a checkpoint of this trainer: {error}") from error
    params = {name: param.detach() for name, param in optimizer.params.items()}
    changed = any(
        name in masters and not torch.equal(param.cpu(), masters[name]) for name, param in params.items()
    )
    copy_exactly(dict(optimizer.params), masters, "adapter")
    optimizer.load_state_dict(moments, values["updates"])
    _restore_version(model, values["adapter_version"], changed)
    restore_versions(model, kept)
    set_random_state(values["random"])
    return state


def _restore_version(model: PreTrainedModel, version: int, changed: bool) -> None:
    """The saved version, or the next one when this process has used that number for other weights."""
    if changed and adapter_version(model) >= version:
        bump_adapter_version(model)
    while adapter_version(model) < version:
        bump_adapter_version(model)
