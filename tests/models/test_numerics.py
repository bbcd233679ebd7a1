"""The fingerprint of a model names everything that its bits depend on, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero.errors import ModelError
from hetero.kernels.cpu import Context, isas, using
from hetero.models import load_model, lora_disabled
from hetero.models.lora import LoraConfig, adapter_version, bump_adapter_version, lora_parameters
from hetero.models.numerics import fingerprint
from hetero.models.versions import (
    BASE,
    keep_versions,
    kept_tensors,
    restore_versions,
    retain_version,
    version_key,
)

LORA = LoraConfig(rank=2, alpha=4.0)
_ELSEWHERE = """
import sys
from hetero.models import load_model
from hetero.models.lora import LoraConfig
from hetero.models.numerics import fingerprint
print(sorted(fingerprint(load_model(sys.argv[1], device="cpu", lora=LoraConfig(rank=2, alpha=4.0))).items()))
"""


def test_another_process_and_another_place_give_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    here = fingerprint(load_model(checkpoint("mixtral"), device="cpu", lora=LORA))
    moved = shutil.copytree(checkpoint("mixtral"), tmp_path / "moved")
    other = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, str(moved)], capture_output=True, text=True, check=True
    )
    assert other.stdout.splitlines()[-1] == str(sorted(here.items()))


def differing(one: dict[str, str], two: dict[str, str]) -> set[str]:
    return {name for name in one if one[name] != two[name]}


def test_each_cause_changes_its_part(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu", lora=LORA)
    before = fingerprint(model)
    with lora_disabled(model):
        base = fingerprint(model)
    assert differing(before, base) == {"adapter"}
    assert base["adapter"] == ""
    with torch.no_grad():
        master = next(iter(lora_parameters(model).values()))
        master[0, 0] *= 1 + 2**-20
    assert fingerprint(model) == before, "too little to change what is computed with"
    with torch.no_grad():
        master[0, 0] *= 2
    assert differing(before, fingerprint(model)) == {"adapter"}
    with lora_disabled(model):
        assert fingerprint(model) == base
    with using(Context(isa="scalar")):
        assert differing(fingerprint(model), fingerprint(model) | {"instruction set": ""}) == {
            "instruction set"
        }
        changed = differing(base | {"adapter": before["adapter"]}, fingerprint(model)) - {"adapter"}
        assert changed == ({"instruction set"} if isas()[-1] != "scalar" else set())
    norm = next(p for name, p in model.named_parameters() if "norm" in name)
    with torch.no_grad():
        norm[0] += 1
    assert "weights" in differing(before, fingerprint(model))
    quantised = fingerprint(load_model(checkpoint("mixtral"), device="cpu", experts="int8", lora=LORA))
    assert {"weights", "experts"} <= differing(before, quantised)
    other = fingerprint(load_model(checkpoint("qwen3_moe"), device="cpu", lora=LORA))
    assert {"weights", "config", "class"} <= differing(before, other)


@pytest.mark.parametrize("dense", ["bf16", "torch"])
def test_a_version_left_behind_keeps_its_fingerprint(dense: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu", dense=dense, lora=LORA)
    keep_versions(model, 3)
    seen = {}
    for _ in range(3):
        seen[adapter_version(model)] = fingerprint(model)
        retain_version(model)
        with torch.no_grad():
            for master in lora_parameters(model).values():
                master.add_(torch.randn(master.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        bump_adapter_version(model)
    seen[adapter_version(model)] = fingerprint(model)
    assert len({own["adapter"] for own in seen.values()}) == 4
    for number in (1, 2, 3):
        assert fingerprint(model, version_key(model, number)) == seen[number]
    kept = {n: {k: t.clone() for k, t in own.items()} for n, own in kept_tensors(model).items()}
    restore_versions(model, kept)
    for number in (1, 2):
        assert "restored" in version_key(model, number)
        assert fingerprint(model, version_key(model, number)) == seen[number]
    assert fingerprint(model, BASE)["adapter"] == ""
    with pytest.raises(ModelError, match="not in memory any more"):
        fingerprint(model, "policy:0:9:9")
