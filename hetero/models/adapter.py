"""Adapters on disk: a PEFT directory that PEFT loads onto the plain model, and that we load back exactly.

`adapter_model.safetensors` holds what the kernels compute with, in bf16 and in PEFT's layout, where shared
factors are repeated for every expert. `hetero_adapter.safetensors` holds the fp32 masters as they are.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from hetero.errors import ModelError
from hetero.models.lora import (
    adapter_version,
    bump_adapter_version,
    install_factors,
    lora_factors,
    lora_parameters,
)
from hetero.models.peft_export import peft_config, peft_pairs
from hetero.models.peft_import import Plan, read_peft
from hetero.models.staging import staged_directory
from hetero.models.tensor_file import TensorEntry, file_sha256, write_tensor_file

MASTERS = "hetero_adapter.safetensors"
_FORMAT = "hetero-adapter-1"


def save_adapter(model: nn.Module, directory: str | Path) -> Path:
    """Write the adapter of `model` as a PEFT directory; an adapter already there is replaced, all at once.

    Raises: ModelError when the model carries no adapter, or `directory` holds something else.
    """
    directory = Path(directory)
    pairs = peft_pairs(model)
    if not pairs:
        raise ModelError(
            "the model carries no LoRA adapter, so there is nothing to save; attach one when loading it"
        )
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory} is not empty and holds no adapter; remove it or choose another directory"
        )
    base = str(getattr(model.config, "_name_or_path", "") or "")
    with staged_directory(directory, replace=True) as staging:
        entries = []
        for pair in pairs:
            prefix = f"base_model.model.{pair.key}.lora_"
            entries += [
                TensorEntry(f"{prefix}A.weight", pair.a_shape, pair.a),
                TensorEntry(f"{prefix}B.weight", pair.b_shape, pair.b),
            ]
        peft_file = staging / "adapter_model.safetensors"
        digest = write_tensor_file(peft_file, entries, torch.bfloat16, {"format": "pt"})
        _write_masters(model, staging / MASTERS, digest)
        config = peft_config(model, pairs, base)
        (staging / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (staging / "README.md").write_text(_model_card(model, config, base))
    return directory


def load_adapter(model: nn.Module, directory: str | Path) -> None:
    """Load the adapter in `directory`: ours to the bit, any other PEFT LoRA adapter as it is.

    A model without an adapter gets one of the shape of the file. A model that carries one has its factors
    overwritten in place, so an optimizer keeps its hold on them; they must then agree in shape and scale.

    Raises: ModelError when there is no LoRA adapter in `directory` or it does not fit the model.
    """
    directory = Path(directory)
    plans = _read_masters(directory)
    if plans is None:
        plans = read_peft(model, directory)
    if not plans:
        raise ModelError(f"the adapter in {directory} is empty")
    if lora_factors(model):
        _overwrite(model, plans, directory)
    else:
        known = dict(model.named_modules())
        for name in known:  # in the order of the model, whatever the order of the file
            if name in plans:
                install_factors(model, name, plans[name].factors, plans[name].scale)
        lost = [name for name in plans if name not in known]
        if lost:
            raise ModelError(
                f"the adapter in {directory} adapts {lost[0]}, which {type(model).__name__} has not"
            )
    bump_adapter_version(model)


def _write_masters(model: nn.Module, path: Path, peft_digest: str) -> None:
    scales = {name: factors.scale for name, factors in lora_factors(model).items()}
    metadata = {"format": _FORMAT, "scales": json.dumps(scales), "adapter_model_sha256": peft_digest}
    entries = [
        TensorEntry(name, tuple(parameter.shape), lambda parameter=parameter: parameter)  # type: ignore[misc]
        for name, parameter in lora_parameters(model).items()
    ]
    write_tensor_file(path, entries, torch.float32, metadata)


def _read_masters(directory: Path) -> dict[str, Plan] | None:
    """Our own factors; None where there are none, or where PEFT has written over its half since."""
    path = directory / MASTERS
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ModelError(f"{path} has the format {metadata.get('format')!r}, expected {_FORMAT!r}")
        peft_file = directory / "adapter_model.safetensors"
        if not peft_file.is_file() or file_sha256(peft_file) != metadata["adapter_model_sha256"]:
            warnings.warn(
                f"{peft_file} has changed since {MASTERS} was written beside it; loading the changed adapter",
                stacklevel=3,
            )
            return None
        plans = {name: Plan(scale=scale) for name, scale in json.loads(metadata["scales"]).items()}
        for key in file.keys():  # noqa: SIM118  (not a dict)
            name, _, part = key.rpartition(".lora_")
            plans[name].factors[part] = file.get_tensor(key)
    return plans


@torch.no_grad()
def _overwrite(model: nn.Module, plans: dict[str, Plan], directory: Path) -> None:
    """Copy into the factors that are there, after checking that every one of them fits."""
    carried, targets = lora_factors(model), lora_parameters(model)
    sources = {f"{name}.lora_{part}": t for name, plan in plans.items() for part, t in plan.factors.items()}
    wrong = sorted(sources.keys() ^ targets.keys())
    wrong += [name for name in sources.keys() & targets.keys() if sources[name].shape != targets[name].shape]
    wrong += [name for name, plan in plans.items() if name in carried and carried[name].scale != plan.scale]
    if wrong:
        raise ModelError(
            f"the adapter in {directory} does not fit the one that the model carries; they differ at "
            f"{wrong[0]} and {len(wrong) - 1} more. Call detach_lora(model) first, or load it into a model "
            "without one."
        )
    for name, source in sources.items():
        targets[name].copy_(source)


def _model_card(model: nn.Module, config: dict[str, Any], base: str) -> str:
    header = "---\nlibrary_name: peft\n" + (f"base_model: {base}\n" if base else "") + "---\n"
    targets = [*config["target_modules"], *(config["target_parameters"] or [])]
    size = sum(parameter.numel() for parameter in lora_parameters(model).values())
    return (
        f"{header}# LoRA adapter for {base or type(model).__name__}\n\n"
        f"Rank {config['r']} on {', '.join(targets)}; {size:,} trained parameters, adapter version "
        f"{adapter_version(model)}. Trained with hetero.\n\n"
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{base or "BASE MODEL"}", dtype="bfloat16")\n'
        'model = PeftModel.from_pretrained(model, "THIS DIRECTORY")\n'
        "```\n\n"
        "PEFT may warn that rank patterns matched no module; it applies them to parameters all the same.\n\n"
        f"`{MASTERS}` holds the same factors in fp32, once each, for `hetero` to go on training from.\n"
    )
