"""Tiny random checkpoints in fp8 and mxfp4, named and laid out as DeepSeek, Qwen and gpt-oss ship theirs,
each with a plain copy that holds the decoded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from architectures import save_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hetero.models.quantizer import unpacked_state_dict

BLOCK = 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def assert_same_weights(model: PreTrainedModel, want: PreTrainedModel) -> None:
    """Both models compute with the same weights, in whatever formats they keep them."""
    got, expected = unpacked_state_dict(model), unpacked_state_dict(want)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3 codes and the fp32 scales of their blocks."""
    n, k = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3).flatten(0, 1)[:n, :k].contiguous(), scales


def from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The bf16 weight that codes and scales stand for."""
    n, k = codes.shape
    full = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
    return (codes.float() * full).bfloat16()


def save_fp8(name: str, directory: Path, **sizes: Any) -> tuple[Path, Path]:
    """(the fp8 checkpoint of a random model, the plain checkpoint of the same weights)."""
    plain = save_tiny(name, directory / "plain", **sizes)
    tensors = load_file(plain / "model.safetensors")
    coded: dict[str, Tensor] = {}
    for key, tensor in list(tensors.items()):
        linear = (tensor.ndim == 2 and key.endswith("proj.weight")) or "_proj_with_mqa" in key
        if not linear or "embed" in key:
            coded[key] = tensor
            continue
        codes, scales = to_fp8(tensor)
        coded |= {key: codes, f"{key}_scale_inv": scales}
        tensors[key] = from_fp8(codes, scales)
    return _save(directory, plain, coded, tensors, FP8_CONFIG)


def save_mxfp4(name: str, directory: Path, **sizes: Any) -> tuple[Path, Path]:
    """(the mxfp4 checkpoint of a random gpt-oss, the plain checkpoint of the same weights)."""
    plain = save_tiny(name, directory / "plain", **sizes)
    tensors = load_file(plain / "model.safetensors")
    coded: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for key, tensor in list(tensors.items()):
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            coded[key] = tensor
            continue
        e, k, n = tensor.shape  # [E, in, out]
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (e, n, k // 32), generator=generator, dtype=torch.uint8)
        coded |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        values = E2M1[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        tensors[key] = values.flatten(-2).mT.bfloat16().contiguous()
    return _save(directory, plain, coded, tensors, MXFP4_CONFIG)


def _save(
    directory: Path,
    plain: Path,
    coded: dict[str, Tensor],
    tensors: dict[str, Tensor],
    quantization: dict[str, Any],
) -> tuple[Path, Path]:
    shipped = directory / "shipped"
    shipped.mkdir()
    save_file(coded, shipped / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (shipped / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return shipped, plain
