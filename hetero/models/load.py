"""`load_model`: a Transformers model with its experts in RAM and its dense parts exact (CPU) or on a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hetero.errors import ModelError, UnavailableError
from hetero.formats import AUTO
from hetero.models.attention import TORCH_METHOD
from hetero.models.checkpoint import open_checkpoint
from hetero.models.config import METHOD, HeteroConfig
from hetero.models.experts import expert_formats
from hetero.models.head import head
from hetero.models.lora import attach_lora
from hetero.models.lora_config import LoraConfig
from hetero.models.probe import attention_calls
from hetero.models.quickstart import resolve_model
from hetero.models.replace import Placement, make_exact, replace_rotary


def load_model(
    path_or_id: str | Path,
    *,
    experts: str = AUTO,
    dense: str = "bf16",
    group_size: int | None = None,
    symmetric: bool | None = None,
    scale_search: str = "max",
    device: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    lora: LoraConfig | None = None,
    lora_seed: int = 0,
    **hf_kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model of Transformers, ready for `Engine` and `Trainer`.

    Args:
        path_or_id: checkpoint directory, GGUF file, Hub id, or a name of `BUILTIN_MODELS` such as
            "quickstart". Checkpoints in fp8 (blocks) and mxfp4 are read as they ship.
        experts: weight format of the routed experts; "auto" keeps the codes that the checkpoint holds as they
            are, and bf16 for plain weights.
        dense: weight format of the other linears on a CPU; "torch" leaves them, and attention, to PyTorch.
        group_size, symmetric: weights of the experts that share a scale (32, 64 or 128), and whether they lie
            around zero; None takes the format's own.
        scale_search: "max", or "mse" for scales of least squared error (slower loading), experts and dense.
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA when there is one.
        dtype: dtype of activations and of what stays unpacked.
        lora: adapter to attach; see `LoraConfig`. It changes nothing until it is trained or loaded.
        lora_seed: seed of the adapter's first values.
        hf_kwargs: passed to `AutoModelForCausalLM.from_pretrained` (revision, token, trust_remote_code, ...).

    Returns: the Transformers model in eval mode, its base frozen. `model.hetero` is its `Placement`; what
        could not be made independent of the batch is listed in `model.hetero.inexact` and warned about.
    Raises: ModelError when the model cannot be expressed, UnavailableError without the asked device.
    """
    where = pick_device(device)
    path_or_id = resolve_model(path_or_id)
    on_cpu = where.type == "cpu"
    exact = on_cpu and dense != "torch"
    checkpoint = open_checkpoint(path_or_id, **hf_kwargs)
    disable_dropout(checkpoint.config)
    model = checkpoint.load(
        dtype=dtype,
        attn_implementation=METHOD if exact else TORCH_METHOD,
        quantization_config=HeteroConfig(
            experts, dense if exact else None, group_size, symmetric, scale_search
        ),
        **hf_kwargs,
    )
    check_attention(model)
    model.requires_grad_(False)
    model.eval()
    if not on_cpu:
        torch.nn.Module.to(model, where)
    placement = Placement(str(where), expert_formats(model) or experts, dense if exact else "torch")
    model.hetero = placement  # type: ignore[assignment]
    attention_calls(model)
    if exact:
        placement.inexact = make_exact(model)
        if placement.inexact:
            warnings.warn(
                f"{type(model).__name__} keeps parts in PyTorch whose results may depend on the batch: "
                f"{'; '.join(placement.inexact)}. Rollout and training log-probabilities may differ in the "
                "last bits.",
                stacklevel=2,
            )
    else:
        replace_rotary(model)
    head(model)
    if lora is not None:
        attach_lora(model, lora, seed=lora_seed)
    return model


def pick_device(device: str) -> torch.device:
    """The device that `device` names. Raises UnavailableError when it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UnavailableError(f"device={device!r} is not supported; use 'cpu' or 'cuda'") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            f"device={device!r} was asked for, but PyTorch sees no CUDA device; use device='cpu'"
        )
    if where.type not in ("cpu", "cuda"):
        raise UnavailableError(f"device={device!r} is not supported; use 'cpu' or 'cuda'")
    return where


def check_attention(model: PreTrainedModel) -> None:
    """Raise ModelError for a model whose attention is more than what it passes to the attention interface."""
    if not model._supports_flash_attn:
        raise ModelError(
            f"{type(model).__name__} attends in a way of its own (it supports no flash attention either), "
            "which hetero "
            "cannot reproduce; from_pretrained(..., quantization_config=HeteroConfig()) packs just its "
            "experts"
        )


def disable_dropout(config: Any) -> None:
    """Set every dropout and router noise of `config` to 0: hetero's forward is deterministic. Warns when one
    was not 0."""
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for name, value in vars(part).items():
            random = "dropout" in name or name.endswith("_pdrop") or name == "router_jitter_noise"
            if random and isinstance(value, (int, float)) and value:
                setattr(part, name, 0.0)
                warnings.warn(f"{name}={value} was set to 0: hetero trains without it", stacklevel=3)
