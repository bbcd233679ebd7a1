"""Training adds activations to the memory of a process, not a second copy of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TRAIN = """
import json, sys
import torch
from hetero.experts import ExpertStore
from hetero.kernels import ops

E, H, I, T, RANK = 24, 1024, 1024, 64, 4

def resident():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return [int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")]

def part(*size):
    return (torch.randn(*size) / size[-1] ** 0.5).requires_grad_()

gate_up, down = torch.randn(E, 2 * I, H).mul_(0.03).bfloat16(), torch.randn(E, H, I).mul_(0.03).bfloat16()
store = ExpertStore.from_tensors(gate_up, down, sys.argv[1])
del gate_up, down
lora = ops.ExpertLoraFactors(part(RANK, H), part(E, I, RANK), part(RANK, H), part(E, I, RANK),
                             part(E, RANK, I), part(H, RANK), scale=1.0)
ids = torch.arange(2 * T).view(T, 2) % E
weights = torch.full((T, 2), 0.5)
x = torch.randn(T, H).bfloat16()
with torch.no_grad():
    ops.experts(store, x, ids, weights)
before = resident()[0]
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is counted anew
for _ in range(3):
    leaf = x.clone().requires_grad_()
    ops.experts(store, leaf, ids, weights, lora).sum().backward()
print(json.dumps({"nbytes": store.nbytes, "grown": resident()[1] - before}))
"""


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_training_adds_activations_alone(format: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, format], env=environment, capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    slots, rank = 2 * 64, 4
    factors = 4 * rank * (2 * 1024 + 1024 + 24 * 3 * 1024)
    activations = slots * (4 * 3 * 1024 * 4 + 2 * 6 * 1024)  # fp32 products and bf16 rows, generously
    allowed = 3 * factors + activations + (8 << 20)  # masters are there: gradients, copies; code and heap
    assert measured["nbytes"] > 1.8 * allowed  # a copy of the weights would be seen
    assert measured["grown"] < allowed
