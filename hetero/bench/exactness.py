"""`hetero bench exactness`: what bit-equal rollouts and training cost, one operation after the other.

Our kernels fix the order of every sum, whatever the batch. The price is what the fastest PyTorch operation
that promises no such thing (bf16 or fp32) would have saved, where there is one that is faster. A layer's
operations count as often as a step of the model calls them; what both sides leave to PyTorch (rotary
embeddings, residual sums) costs the same and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hetero.bench import attention, linear, moe, rows
from hetero.bench.case import PEERS, Settings
from hetero.bench.machine import Machine
from hetero.bench.shapes import ModelShape, model_shape

LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Kernel cases that a step runs, and how often it runs each of them by label."""

    cases: Callable[[Settings, Machine], Iterator[dict[str, Any]]]
    settings: Settings
    calls: Callable[[str], int]


def cases(settings: Settings, machine: Machine, context: int = 128) -> Iterator[dict[str, Any]]:
    """One record per operation, then one for the whole, of decoding and of a training step.

    Args:
        settings: `shape` is a model's name; `tokens` are the sequences that decode one token each at
            `context` positions, and the tokens of one training step (forward and backward, LoRA).

    Yields:
        {op, phase, part, shape, isa, tokens, threads, calls, ms, fastest, fastest_ms, cost}: ms of all calls
        of a step, and `cost` the share of the exact time that the fastest choice would save (0: ours is).
    """
    model = model_shape(settings.shape)
    decode, step = settings.tokens
    phases = {
        "decode": replace(settings, tokens=(decode,), context=context),
        "step": replace(settings, tokens=(step,), backward=True, lora_rank=LORA_RANK),
    }
    for phase, chosen in phases.items():
        found = [line for part in _parts(model, chosen) for line in _costs(part, phase, machine)]
        yield from found
        exact, fastest = (sum(line[key] for line in found) for key in ("ms", "fastest_ms"))
        whole = {"part": "all", "calls": 1, "ms": exact, "fastest": "", "fastest_ms": fastest}
        yield {**found[0], **whole, "cost": 1 - fastest / exact}


def _parts(model: ModelShape, settings: Settings) -> Iterator[Part]:
    def per_layer(_: str) -> int:
        return model.layers

    def linears(label: str) -> int:
        return {"k_proj": 2 * model.layers, "lm_head": 1}.get(label, model.layers)

    def norms(label: str) -> int:
        return {"rms_norm": 2 * model.layers + 1, "sample": 1}.get(label, model.layers)

    without = replace(settings, context=0)
    yield Part(moe.cases, without, per_layer)
    yield Part(linear.cases, without, linears)
    yield Part(attention.cases, replace(settings, lora_rank=0), per_layer)
    yield Part(rows.cases, replace(without, lora_rank=0), norms)


def _costs(part: Part, phase: str, machine: Machine) -> Iterator[dict[str, Any]]:
    """The records of a part, each with the faster of the peers where one is faster than we are."""
    sides = [list(part.cases(replace(part.settings, against=peer), machine)) for peer in PEERS]
    for lines in zip(*sides, strict=True):
        best = min(lines, key=lambda line: line["ratio"])
        label = best["shape"].partition("/")[2]
        calls = part.calls(label)
        ratio = min(1.0, best["ratio"])
        exact = calls * best["ms"]
        yield {
            "op": "exactness",
            "phase": phase,
            "part": label or best["op"],
            "shape": part.settings.shape,
            "isa": best["isa"],
            "tokens": best["tokens"],
            "threads": best["threads"],
            "calls": calls,
            "ms": exact,
            "fastest": best["peer"] if ratio < 1 else "hetero",
            "fastest_ms": exact * ratio,
            "cost": 1 - ratio,
        }
