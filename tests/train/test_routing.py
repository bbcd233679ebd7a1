"""Recorded experts in training: packed to the right rows, replayed when off-policy, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hetero.engine import Engine, SamplingParams
from hetero.errors import ArgumentError, DataError
from hetero.models.lora import adapter_version, bump_adapter_version, lora_parameters
from hetero.models.routing import routing_sites
from hetero.models.versions import keep_versions, retain_version
from hetero.train import Trainer, TrainSample
from hetero.train.batch import pack
from hetero.train.routing import is_replayed

PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 9, *range(10, 45)], [60]]


def rollout(model: PreTrainedModel, record: bool = True) -> list[TrainSample]:
    """Samples of the current version, two of one group."""
    with Engine(model, kv_memory="8MiB", record_routing=record, prefill_chunk=7, max_num_seqs=3) as engine:
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=9, ignore_eos=True))
    return [
        TrainSample(
            prompt,
            c.token_ids,
            c.logprobs,
            advantage=(-1.0) ** i,
            group=min(i, 1) + i // 3,
            adapter_version=c.adapter_version,
            routes=c.routes,
        )
        for i, (prompt, c) in enumerate(zip(PROMPTS, done, strict=True))
    ]


def update(model: PreTrainedModel, size: float = 0.5) -> None:
    retain_version(model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for master in lora_parameters(model).values():
            master.add_(torch.randn(master.shape, generator=generator) * size)
    bump_adapter_version(model)


def trainer(model: PreTrainedModel, replay: str = "auto", **kwargs: object) -> Trainer:
    return Trainer(model, lr=1e-2, routing_replay=replay, **kwargs)


def test_the_engine_records_the_experts_of_every_token(load_moe: Callable[..., PreTrainedModel]) -> None:
    model = load_moe()
    samples = rollout(model)
    assert all(s.routes is None for s in rollout(model, record=False))
    for sample in samples:
        assert sample.routes is not None
        assert sample.routes.shape == (9, len(routing_sites(model)), 2)
        assert sample.routes.dtype == np.uint8
    metrics = trainer(model, "on").forward_backward(samples)
    assert metrics["moe/replayed_tokens"] > 0
    assert metrics["moe/route_flip_rate"] == metrics["moe/tokens_with_any_flip"] == 0.0
    assert metrics["mismatch/logp_abs_max"] == 0.0


def test_a_record_goes_to_the_row_that_a_token_was_drawn_from() -> None:
    def sample(
        prompt: list[int], completion: list[int], first: int, mask: list[bool] | None = None
    ) -> TrainSample:
        count = len(completion) if mask is None else sum(mask)
        routes = (first + np.arange(count, dtype=np.uint8)).repeat(6).reshape(count, 3, 2)
        return TrainSample(prompt, completion, advantage=1.0, mask=mask, routes=routes)

    one = sample([1, 2, 3], [4, 5, 6], 10)
    two = sample([1, 2, 3], [4, 7, 8, 9], 20, [True, False, False, True])
    (batch,) = pack([one, two, TrainSample([1, 2], [11, 12])], 100)
    assert batch.routes is not None
    found = sorted(
        (token, *set(route.flatten().tolist()))
        for token, route in zip(batch.forward.token_ids.tolist(), batch.routes, strict=True)
    )
    # Token 4 comes from the row of token 3, for which the two have different records: they part there.
    rows = [(1, -1), (2, -1), (3, 10), (3, 20), (4, 11), (4, -1), (5, 12), (7, -1), (8, 21), (11, -1)]
    assert found == sorted(rows)
    assert batch.num_rows == len(rows)
    same = pack([one, replace(one, completion_ids=[4, 5, 9])], 100)[0]
    assert same.num_rows == 5, "the same record: everything is shared"
    assert pack([TrainSample([1, 2], [11, 12])], 100)[0].routes is None
    with pytest.raises(DataError, match="routes has 3 tokens, but mask says that 2 were sampled"):
        replace(two, routes=one.routes)


@pytest.mark.parametrize("checkpointing", ["layer", "none"])
def test_replaying_the_same_version_changes_no_bit(
    checkpointing: str, load_moe: Callable[..., PreTrainedModel]
) -> None:
    model = load_moe()
    samples = rollout(model)
    gradients = []
    for replay in ("off", "on"):
        own = trainer(model, replay, checkpointing=checkpointing, micro_batch_tokens=40)
        own.forward_backward(samples)
        gradients.append(own.gradients())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("checkpointing", ["layer", "none"])
def test_samples_of_another_version_are_replayed(
    checkpointing: str, load_moe: Callable[..., PreTrainedModel]
) -> None:
    model = load_moe()
    keep_versions(model, 2)
    samples = rollout(model)
    update(model)
    seen = {}
    for replay in ("off", "auto", "on"):
        own = trainer(model, replay, checkpointing=checkpointing)
        metrics = own.forward_backward(samples)
        seen[replay] = own.gradients()
        assert metrics["mismatch/logp_abs_max"] == 0.0, "computed again under the version that sampled"
        assert metrics["mismatch/tokens"] > 0
        assert metrics["off_policy/version_lag_max"] == 1.0
        assert metrics["off_policy/ess"] < 1.0
        assert (metrics["moe/route_flip_rate"] > 0.0) == (replay != "off")
        assert metrics["moe/tokens_with_any_flip"] >= metrics["moe/route_flip_rate"]
    name = next(iter(seen["off"]))
    assert torch.equal(seen["auto"][name], seen["on"][name])
    assert not torch.equal(seen["auto"][name], seen["off"][name])


def test_samples_of_two_versions_in_one_pack_each_have_their_experts(
    load_moe: Callable[..., PreTrainedModel],
) -> None:
    """Beside each other they get the bits that they have alone, though they begin alike."""
    model = load_moe()
    keep_versions(model, 2)
    old = rollout(model)
    update(model, 0.2)
    new = rollout(model)
    assert any(
        a.routes is not None and b.routes is not None and (a.routes[0] != b.routes[0]).any()
        for a, b in zip(old, new, strict=True)
    ), "the case has no record that differs"
    for replay in ("auto", "on"):
        logs = []
        for samples in (old, new, [*old, *new]):
            log: list[torch.Tensor] = []
            own = trainer(model, replay, micro_batch_tokens=4096)
            run = own._run

            def kept(*args: object, log: list[torch.Tensor] = log, run: object = run, **kw: object) -> object:
                columns = run(*args, **kw)  # type: ignore[operator]
                log.append(columns["logprobs"])
                return columns

            own._run = kept  # type: ignore[method-assign]
            metrics = own.forward_backward(samples)
            assert metrics["mismatch/logp_abs_max"] == 0.0
            logs.append(torch.cat(log))
        alone, together = torch.cat(logs[:2]).sort().values, logs[2].sort().values
        assert torch.equal(alone, together)


def test_which_samples_are_replayed(load_moe: Callable[..., PreTrainedModel]) -> None:
    routes = np.zeros((2, 1, 2), np.uint8)
    mine = TrainSample([1], [2, 3], adapter_version=4, routes=routes)
    assert [is_replayed(mine, mode, 4) for mode in ("auto", "on", "off")] == [False, True, False]
    assert [is_replayed(mine, mode, 5) for mode in ("auto", "on", "off")] == [True, True, False]
    unknown = replace(mine, adapter_version=None)
    assert [is_replayed(unknown, mode, 5) for mode in ("auto", "on")] == [False, True]
    assert not is_replayed(replace(mine, routes=None), "on", 5)
    with pytest.raises(ArgumentError, match="routing_replay is 'perhaps'"):
        trainer(load_moe(), "perhaps")


def test_routing_metrics_do_not_depend_on_the_cut(load_moe: Callable[..., PreTrainedModel]) -> None:
    model = load_moe()
    samples = rollout(model)
    update(model)
    found = []
    for rows in (4096, 60):
        metrics = trainer(model, micro_batch_tokens=rows).forward_backward(samples)
        found.append({k: v for k, v in metrics.items() if k.startswith("moe/")})
    whole, cut = found
    assert whole.keys() == cut.keys()
    assert 1.0 <= whole["moe/load_max_over_mean"] <= 4.0
    assert 0.5 < whole["moe/load_entropy"] <= 1.0
    assert 0.0 < whole["moe/experts_touched"] <= 1.0
    assert 0.5 <= whole["moe/routing_confidence"] <= 1.0
    assert whole["moe/topk_margin_p01"] >= 0.0
    for name in ("moe/routing_confidence", "moe/load_entropy", "moe/replayed_tokens"):
        assert cut[name] == pytest.approx(whole[name], rel=0.3), name


def test_the_share_of_experts_with_a_gradient(load_moe: Callable[..., PreTrainedModel]) -> None:
    model = load_moe()
    own = trainer(model)
    own.forward_backward(rollout(model))
    assert own.optim_step()["moe/lora_grad_experts_frac"] == 1.0
    lone = trainer(model)
    lone.forward_backward([TrainSample([5], [6], [-1.0], advantage=1.0)])
    share = lone.optim_step()["moe/lora_grad_experts_frac"]
    assert share == 2 / routing_sites(model)[0].num_experts
    assert adapter_version(model) == 2
