"""The whole examination, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from hetero.doctor.adapter import attach_adapter, check_adapter
from hetero.doctor.cache import check_tiers
from hetero.doctor.exactness import check_exactness
from hetero.doctor.experts import check_experts
from hetero.doctor.finding import Finding, guarded, judge
from hetero.doctor.machine import check_machine
from hetero.doctor.memory import available_bytes, check_loaded, check_room, plan_of, resident_bytes
from hetero.doctor.processes import check_processes
from hetero.doctor.speed import check_speed
from hetero.doctor.subject import Subject
from hetero.doctor.tiny import tiny_model
from hetero.doctor.versions import check_versions
from hetero.kernels.cpu import Context, using
from hetero.models.load import load_model, pick_device
from hetero.models.quickstart import resolve_model


def examine(model: str | None, *, device: str = "auto", threads: int | None = None) -> Iterator[Finding]:
    """Check the machine and a model as a run would use them; findings come as they are made.

    Args:
        model: checkpoint directory, Hub id or built-in name; None builds a tiny random one.
        device, threads: as `model.device` and `model.threads` of a recipe.
    """
    with ExitStack() as stack:
        yield from guarded("versions", check_versions)
        stack.enter_context(using(Context(threads)))
        stack.enter_context(_one_torch_thread(device))
        yield from guarded("kernels", check_machine)
        yield from guarded("speed", check_speed)
        yield from guarded("processes", check_processes)
        path = str(stack.enter_context(tiny_model())) if model is None else model
        loaded: list[Subject] = []
        yield from guarded("model", partial(_load, path, device, loaded))
        for subject in loaded:
            yield from guarded("experts", partial(check_experts, subject.model))
            yield from guarded("adapter", partial(attach_adapter, subject))
            yield from guarded("exact", partial(check_exactness, subject))
            yield from guarded("adapter", partial(check_adapter, subject))
            yield from guarded("cache", partial(check_tiers, subject))


def _load(path: str, device: str, loaded: list[Subject]) -> Iterator[Finding]:
    path = resolve_model(path)
    plan = plan_of(path, device)
    yield check_room(plan, available_bytes())
    before = resident_bytes()
    model = load_model(path, device=device)
    if pick_device(device).type == "cpu":
        yield check_loaded(plan, before, resident_bytes())
    placement: Any = model.hetero
    inexact = placement.inexact
    yield judge(
        "model/exact_parts",
        not inexact,
        f"{type(model).__name__} on {model.device}" + (f": {'; '.join(inexact)}" if inexact else ""),
        "These parts stay in PyTorch and may depend on the batch: rollout and training may differ in the "
        "last bits. Watch mismatch/logp_abs_max in metrics.jsonl, and report the model's name.",
    )
    loaded.append(Subject.of(model))


@contextmanager
def _one_torch_thread(device: str) -> Iterator[None]:
    """PyTorch on one thread where the kernels do the work, as in a run."""
    before = torch.get_num_threads()
    if pick_device(device).type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
