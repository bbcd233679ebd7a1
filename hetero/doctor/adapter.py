"""Whether the adapter reaches the sampler, leaves the base alone, and never meets an old cache."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero.doctor.finding import Finding, judge
from hetero.doctor.subject import ALPHA, RANK, Subject, stir
from hetero.engine.sequence import Completion
from hetero.kernels.batch import KV_BLOCK
from hetero.models.lora import (
    adapter_version,
    attach_lora,
    bump_adapter_version,
    lora_disabled,
    lora_parameters,
)
from hetero.models.lora_config import LoraConfig
from hetero.models.versions import adapter_at, keep_versions, retain_version

_REPORT = "Please report it with the output of `hetero doctor --json`, and do not train on this model."


def attach_adapter(subject: Subject) -> Iterator[Finding]:
    """Attach a fresh adapter, then make it matter; the base model must come through unchanged."""
    model = subject.model
    with subject.engine() as engine:
        base = subject.ask(engine)
        attach_lora(model, LoraConfig(rank=RANK, alpha=ALPHA))
        fresh = subject.ask(engine)
        stir(model, seed=1)
        with lora_disabled(model):
            disabled = subject.ask(engine)
            engine.reset_cache()
            recomputed = subject.ask(engine)
    yield subject.compare("adapter/fresh_changes_nothing", [(base, fresh)], _REPORT)
    yield subject.compare(
        "adapter/disabled_is_base",
        [(base, disabled), (base, recomputed)],
        "The reference is wrong. " + _REPORT,
    )


def check_adapter(subject: Subject) -> Iterator[Finding]:
    """Plant a change in each kind of layer and look for it in the samples; then update with a warm cache."""
    yield _canary(subject)
    with subject.engine() as engine:
        before = subject.ask(engine)
        old = engine.stats.copy()
        stir(subject.model, seed=2)
        warm = subject.ask(engine)
        # Within the call the two equal prompts share one computation; anything more is from the old adapter.
        shared = len(subject.prompts[0]) + len(subject.prompts[0]) // KV_BLOCK * KV_BLOCK
        stale = max(0, (engine.stats - old).cached_tokens - shared)
        engine.reset_cache()
        cold = subject.ask(engine)
    changed = [c.logprobs for c in warm] != [c.logprobs for c in before]
    yield judge("adapter/update_changes_samples", changed, "yes" if changed else "no", _REPORT)
    yield subject.compare(
        "cache/on_equals_off_after_update",
        [(cold, warm), (cold, subject.scores(cold, 4096))],
        "Keys and values of an old adapter are used. Call engine.reset_cache() after every update. "
        + _REPORT,
    )
    yield judge("cache/stale_tokens", stale == 0, stale, _REPORT)
    yield _versions(subject)


def _versions(subject: Subject) -> Finding:
    """Begin answers under one version, update, finish them beside answers of the next; score both."""
    model = subject.model
    keep_versions(model, 2)
    try:
        with subject.engine() as engine:
            old = adapter_version(model)
            before = subject.begin(engine)
            for _ in range(2):
                engine.step()
            retain_version(model)
            stir(model, seed=3)
            after = subject.begin(engine)
            while engine.step():
                pass
        pairs = []
        for version, generation in ((old, before), (adapter_version(model), after)):
            with adapter_at(model, version):
                done = generation.completions
                pairs.append((done, subject.scores(done, 4096)))
        return subject.compare(
            "adapter/versions_side_by_side", pairs, "Leave rl.max_staleness at 0. " + _REPORT
        )
    finally:
        keep_versions(model, 1)


def _canary(subject: Subject) -> Finding:
    """Change the factors of one kind of layer at a time; each change must move the log-probabilities."""
    kinds: dict[str, list[nn.Parameter]] = {}
    for name, master in lora_parameters(subject.model).items():
        if name.endswith("b"):
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(master)
    silent = [kind for kind, masters in kinds.items() if not _heard(subject, masters)]
    return judge(
        "adapter/reaches_sampler",
        bool(kinds) and not silent,
        f"{len(kinds) - len(silent)} of {len(kinds)} kinds of layers",
        f"Changing the adapter of {', '.join(silent) or 'any layer'} changes no sample, so training it would "
        f"be in vain: leave it out of lora.targets. {_REPORT}",
    )


def _heard(subject: Subject, masters: list[nn.Parameter]) -> bool:
    before = _first_tokens(subject)
    kept = [master.detach().clone() for master in masters]
    try:
        _write(subject.model, masters, [k + 0.5 * torch.ones_like(k).cumsum(0).cos() for k in kept])
        return _first_tokens(subject) != before
    finally:
        _write(subject.model, masters, kept)


def _first_tokens(subject: Subject) -> list[list[float]]:
    with subject.engine() as engine:
        done: list[Completion] = subject.ask(engine, subject.prompts[-1:], max_tokens=2)
    return [c.logprobs for c in done]


@torch.no_grad()
def _write(model: PreTrainedModel, masters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for master, value in zip(masters, values, strict=True):
        master.copy_(value)
    bump_adapter_version(model)
