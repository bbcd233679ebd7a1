"""What the doctor says about a model: well for every architecture, red for every defect that is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor

from hetero.doctor.adapter import attach_adapter, check_adapter
from hetero.doctor.cache import check_tiers
from hetero.doctor.exactness import check_exactness
from hetero.doctor.experts import check_experts
from hetero.doctor.finding import Finding, guarded
from hetero.doctor.subject import Subject
from hetero.engine.kv_cache import BlockManager
from hetero.engine.model_runner import ModelRunner
from hetero.engine.tiers.arena import Arena
from hetero.engine.tiers.directory import BlockDirectory
from hetero.experts.store import ExpertStore
from hetero.kernels import cpu, ops
from hetero.models import LmHead, load_model
from hetero.models import lora as lora_module

Checkpoint = Callable[[str], Path]
EXACT = [
    "exact/prefix_reuse",
    "exact/decode_and_prefill",
    "exact/chunked_prefill",
    "exact/batch",
    "exact/training",
    "exact/packed_training",
    "exact/threads",
]


@pytest.fixture
def subject(checkpoint: Checkpoint) -> Subject:
    return Subject.of(load_model(checkpoint("mixtral"), device="cpu"))


@pytest.fixture
def adapted(subject: Subject) -> Subject:
    assert all(finding.ok for finding in attach_adapter(subject))
    return subject


def examine(subject: Subject) -> Iterator[Finding]:
    yield from check_experts(subject.model)
    yield from attach_adapter(subject)
    yield from check_exactness(subject)
    yield from check_adapter(subject)
    yield from check_tiers(subject)


def red(findings: Iterator[Finding]) -> set[str]:
    found = list(findings)
    assert all(bool(finding.fix) != finding.ok for finding in found)
    return {finding.check for finding in found if not finding.ok}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_is_well(checkpoint: Checkpoint, name: str) -> None:
    found = list(examine(Subject.of(load_model(checkpoint(name), device="cpu"))))
    assert [finding for finding in found if not finding.ok] == []
    assert [finding.check for finding in found if finding.check.startswith("exact/")] == EXACT
    assert all(finding.value == 0.0 for finding in found if finding.check.startswith("exact/"))


def test_a_slow_model_is_asked_less(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(checkpoint("mixtral"), device="cpu")
    usual = Subject.of(model)
    monkeypatch.setattr("hetero.doctor.subject.SLOW", 0.0)
    short = Subject.of(model)
    assert short.max_tokens < usual.max_tokens
    assert red(examine(short)) == set()


@pytest.mark.filterwarnings("ignore")
def test_dense_parts_in_pytorch_need_only_be_close(checkpoint: Checkpoint) -> None:
    subject = Subject.of(load_model(checkpoint("mixtral"), device="cpu", dense="torch"))
    assert not subject.exact
    assert subject.judge("exact/batch", [0.0] * 99 + [0.5], "fix").ok
    assert not subject.judge("exact/batch", [0.0] * 9 + [0.5], "fix").ok


# --- defects


def test_a_head_that_depends_on_the_batch(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = LmHead.logits

    def logits(head: LmHead, hidden: Tensor) -> Tensor:
        return exact(head, hidden) * (1 + 2.0**-20 * (hidden.shape[0] == 1))

    monkeypatch.setattr(LmHead, "logits", logits)
    assert "exact/batch" in red(check_exactness(adapted))


def test_a_norm_that_depends_on_the_threads(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ops.rms_norm

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *rest: Any, **options: Any) -> Tensor:
        return exact(x, weight, eps * 50 * cpu.context().threads, *rest, **options)

    monkeypatch.setattr(ops, "rms_norm", rms_norm)
    assert red(check_exactness(adapted)) == {"exact/threads"}


def test_a_training_forward_of_its_own(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = LmHead.logprobs
    monkeypatch.setattr(
        LmHead, "logprobs", lambda head, hidden, targets, t: exact(head, hidden, targets, 1.01 * t)
    )
    assert {"exact/training", "exact/packed_training"} <= red(check_exactness(adapted))


def test_a_cache_that_is_never_used(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "find", lambda manager, namespace, ids: [])
    (found,) = [f for f in check_exactness(adapted) if not f.ok]
    assert (found.check, found.value) == ("exact/prefix_reuse", "nothing was reused")


def test_nan(adapted: Subject) -> None:
    with torch.no_grad():
        adapted.model.get_input_embeddings().weight.fill_(float("nan"))
    (found,) = guarded("exact", partial(check_exactness, adapted))
    assert (found.check, found.ok) == ("exact", False)
    assert "NaN" in found.fix


def test_a_sampler_without_the_adapter(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ModelRunner.forward

    def forward(runner: ModelRunner, token_ids: Tensor, *batch: Any) -> Tensor:
        return exact(runner, token_ids, *batch[:-1], [("base", len(token_ids))])

    monkeypatch.setattr(ModelRunner, "forward", forward)
    assert {"adapter/reaches_sampler", "adapter/update_changes_samples"} <= red(check_adapter(adapted))


def test_one_kind_of_layer_without_its_adapter(adapted: Subject) -> None:
    for name, module in adapted.model.named_modules():
        if name.endswith("v_proj"):
            module.lora = None
    (found,) = [f for f in check_adapter(adapted) if f.check == "adapter/reaches_sampler"]
    assert not found.ok
    assert "v_proj" in found.fix
    assert "k_proj" not in found.fix


def test_a_cache_that_outlives_an_update(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "namespace", lambda runner, version=None: "policy:0")
    monkeypatch.setattr(ModelRunner, "resident", lambda runner: {"policy:0"})
    monkeypatch.setattr(ModelRunner, "_weights", lambda runner, runs: nullcontext())
    assert {"cache/on_equals_off_after_update", "cache/stale_tokens"} <= red(check_adapter(adapted))


def test_a_version_that_follows_the_masters(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.LoraFactors, "frozen", lambda factors, dtype=None: factors)
    monkeypatch.setattr(ops.ExpertLoraFactors, "frozen", lambda factors, experts: factors)
    assert red(check_adapter(adapted)) == {"adapter/versions_side_by_side"}


def test_files_of_an_old_adapter_are_noticed(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.engine.stepper.root_of", lambda fingerprint: bytes(16))
    assert {"cache/tiers_after_update", "cache/tiers_stale_tokens"} <= red(check_tiers(adapted))


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_tier_that_alters_bytes_is_noticed(
    adapted: Subject, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    def spoil(data: Any) -> None:
        data[::2] ^= 64

    get, load = Arena.get, BlockDirectory.load

    def spoiled_get(self: Arena, *args: Any) -> bool:
        spoil(self._data.reshape(-1))
        return get(self, *args)

    def spoiled_load(self: BlockDirectory, name: Any, out: Any) -> bool | None:
        found = load(self, name, out)
        spoil(out)
        return found

    if tier == "ram":
        monkeypatch.setattr(Arena, "get", spoiled_get)
    else:
        monkeypatch.setattr(BlockDirectory, "load", spoiled_load)
    assert red(check_tiers(adapted)) == {"cache/tiers_after_update"}


def test_a_tier_that_loses_blocks_is_noticed(adapted: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "has", lambda *args: False)
    assert red(check_tiers(adapted)) == {"cache/tiers_used"}


def test_a_fresh_adapter_that_changes_something(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_module, "_initial", lambda name, part, shape, seed: torch.full(shape, 0.1))
    assert red(attach_adapter(subject)) == {"adapter/fresh_changes_nothing"}


def test_experts_that_compute_something_else(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExpertStore.forward
    monkeypatch.setattr(ExpertStore, "forward", lambda store, *args: exact(store, *args) * 1.05)
    assert red(check_experts(subject.model)) == {"experts/error"}


def test_experts_that_are_never_called(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    block = subject.model.model.layers[1].mlp
    monkeypatch.setattr(block, "forward", lambda hidden: hidden)
    assert red(check_experts(subject.model)) == {"experts/run"}
