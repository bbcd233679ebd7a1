"""Loading streams: the peak stays near the packed size, and no file stays mapped behind the model's back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from hetero.models import base_hash, load_model
from hetero.models.mapped_files import release_file_pages

SCRIPT = """
import sys, torch
from hetero.models import load_model, streaming
from hetero.models.hashing import base_tensors

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
warm, path = sys.argv[1:]
load_model(warm, device="cpu")
streaming.pages.step = 4 << 20
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
model = load_model(path, device="cpu")
peak = status("VmHWM") - before
with open("/proc/self/maps") as lines:
    mapped = sum(".safetensors" in line for line in lines)
print(peak, sum(tensor.nbytes for _, tensor in base_tensors(model)), mapped)
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak-memory counter"
)
def test_peak_memory_is_within_a_tenth_of_the_packed_size(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=14,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(tmp_path, max_shard_size="40MB")
    del model
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint("mixtral")), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, packed, mapped = map(int, done.stdout.split())
    assert packed > 350e6
    assert peak < 1.1 * packed
    assert mapped == 0


def test_releasing_pages_does_no_harm(checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    digest = base_hash(model)
    release_file_pages()
    assert base_hash(model) == digest
