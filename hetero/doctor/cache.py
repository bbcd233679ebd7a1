"""Whether RAM and disk below the KV cache change nothing, and never serve an old adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial

from hetero.doctor.finding import Finding, judge
from hetero.doctor.subject import Subject, stir
from hetero.engine.engine import Engine
from hetero.engine.sequence import Completion
from hetero.kernels.batch import KV_BLOCK

_ADVICE = (
    "Leave engine.kv_ram and engine.kv_disk out of the recipe, and report it with the output of "
    "`hetero doctor --json`."
)
_ALWAYS = 1e6
"""Seconds that prefill seems to have taken, so that no tier is passed over for being slower."""


def check_tiers(subject: Subject) -> Iterator[Finding]:
    """Fill both tiers, update the adapter, then answer from each of them and without any."""
    prompt = max(subject.prompts, key=len)
    other = prompt[1:] + prompt[:1]
    needed = -(-(len(prompt) + subject.max_tokens) // KV_BLOCK)
    with tempfile.TemporaryDirectory(prefix="hetero-doctor-") as folder:
        tiered = partial(subject.engine, num_blocks=needed, kv_ram="64MiB", kv_disk=folder)
        with tiered() as engine:
            _ask(subject, engine, prompt)
        stir(subject.model, seed=3)
        with subject.engine(num_blocks=needed) as engine:
            cold = _ask(subject, engine, prompt)
        with tiered() as engine:
            after = _ask(subject, engine, prompt)
            stale = engine.stats.cached_tokens + engine.stats.stale_refused
            _ask(subject, engine, other)  # takes the whole pool
            from_ram = _ask(subject, engine, prompt)
            ram = engine.stats.ram_in_time
        with tiered() as engine:
            from_disk = _ask(subject, engine, prompt)
            disk, refused = engine.stats.disk_in_time, engine.stats.disk_refused
    yield subject.compare(
        "cache/tiers_after_update", [(cold, after), (cold, from_ram), (cold, from_disk)], _ADVICE
    )
    yield judge("cache/tiers_stale_tokens", stale == 0, stale, _ADVICE)
    yield judge(
        "cache/tiers_used",
        ram > 0 and disk > 0 and refused == 0,
        f"{ram} tokens from RAM, {disk} from disk, {refused} files refused",
        "Blocks are lost on the way to RAM or disk. " + _ADVICE,
    )


def _ask(subject: Subject, engine: Engine, prompt: list[int]) -> list[Completion]:
    engine.stats.prefill_seconds += _ALWAYS
    return subject.ask(engine, [prompt])
