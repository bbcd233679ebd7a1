"""Any number of memory nodes gives the same bits; the environment, the affinity mask and the quota count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from attention_cases import Case, shared_prompt_batch
from expert_cases import Layer, Tokens, bf16, run
from test_context import run_python

from hetero.errors import ArgumentError
from hetero.formats import FORMATS, packing
from hetero.kernels import cpu, ops

FORMATS_HERE = [name for name, row in FORMATS.items() if not row.imported]
NODES = (2, 3, 4)


@pytest.mark.parametrize("format", FORMATS_HERE)
def test_packed_and_linear(format: str) -> None:
    weight, x, dy = bf16(200, 131), bf16(9, 131, seed=1), bf16(9, 200, seed=2)
    seen = []
    for nodes in (1, *NODES):
        with cpu.using(cpu.Context(4, nodes=nodes)):
            packed = cpu.pack(weight, packing=packing(format))
            leaf = x.clone().requires_grad_()
            y = ops.linear(leaf, packed)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            seen.append((packed.data.view(torch.int16), packed.unpack(), y, dx))
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))


@pytest.mark.parametrize("layout", ["shared", "per_expert"])
@pytest.mark.parametrize(
    ("t", "h", "i"), [(1, 96, 160), (40, 96, 160), (5, 200, 131), (9, 288, 200), (3, 40, 1407)]
)
def test_experts(layout: str, t: int, h: int, i: int) -> None:
    results = []
    for nodes in (1, *NODES):
        with cpu.using(cpu.Context(5, nodes=nodes)):
            layer = Layer(5, h, i, biases=True)
            results.append(run(layer, Tokens.random(layer, t, 2), layer.factors(8, layout)))
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.out, other.out)
        assert torch.equal(first.dx, other.dx)
        assert torch.equal(first.dweights, other.dweights)
        assert all(torch.equal(grad, other.dfactors[name]) for name, grad in first.dfactors.items())


def test_attention_and_head() -> None:
    case, batch = Case(heads=6, kv_heads=2), shared_prompt_batch(50, [9, 20])
    q, k, v = (x.requires_grad_() for x in case.qkv(79))
    hidden, targets = bf16(7, 64).requires_grad_(), torch.arange(7)
    head = cpu.pack(bf16(300, 64, scale=0.1))
    seen = []
    for nodes in (1, *NODES):
        with cpu.using(cpu.Context(4, nodes=nodes)):
            out = ops.attention(q, k, v, batch, **case.options())  # type: ignore[arg-type]
            logp, _ = ops.token_logprobs(hidden, head, targets, 1.0)
            gradients = torch.autograd.grad(out.float().sum() + logp.sum(), (q, k, v, hidden))
            seen.append((out, logp, *gradients))
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))


def test_large_stacks_are_placed_by_their_nodes() -> None:
    """More than a page per panel, packed one matrix and one part at a time, as checkpoints come."""
    weights = bf16(3, 2 * 96, 4096, scale=0.02).bfloat16()
    plain = cpu.pack(weights, parts=2)
    with cpu.using(cpu.Context(4, nodes=3)):
        packed = cpu.PackedWeight.empty(3, 192, 4096, parts=2)
        for index, weight in enumerate(weights):
            for part in range(2):
                packed.set_part(index, part, weight[96 * part : 96 * (part + 1)])
    assert torch.equal(packed.data.view(torch.int16), plain.data.view(torch.int16))


def test_no_more_nodes_than_threads() -> None:
    assert cpu.Context(2, nodes=4).nodes == 2
    assert cpu.Context(4, nodes=3).nodes == 3
    with pytest.raises(ValueError, match="nodes is 0"):
        cpu.Context(1, nodes=0)


def test_the_environment_chooses() -> None:
    code = "from hetero.kernels import cpu; print(cpu.Context(4).nodes, cpu.Context(4, nodes=2).nodes)"
    assert run_python(code, HETERO_NUMA_NODES="3").stdout.split() == ["3", "2"]
    wrong = (
        "from hetero.kernels import cpu; from hetero.errors import ArgumentError\n"
        "try: cpu.Context(4)\n"
        "except ArgumentError as e: print(e)"
    )
    assert "HETERO_NUMA_NODES is 'two'" in run_python(wrong, HETERO_NUMA_NODES="two").stdout
    assert issubclass(ArgumentError, ValueError)


def test_nodes_of_the_machine() -> None:
    allowed = os.sched_getaffinity(0)
    root, used = Path("/sys/devices/system/node"), 0
    for listed in root.glob("node[0-9]*/cpulist"):
        spans = [part.split("-") for part in listed.read_text().strip().split(",") if part]
        cpus = {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
        used += bool(cpus & allowed)
    got = run_python("from hetero.kernels import cpu; print(cpu.Context(64).nodes)", HETERO_NUMA_NODES="")
    assert int(got.stdout) == max(1, used)
