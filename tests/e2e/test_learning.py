"""A whole run in one process: the reward rises, the base stays, every promised number is there."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from hetero import loop
from hetero.models.hashing import base_hash
from hetero.run import parts as run_parts

METRICS = """
step reward reward_std frac_reward_zero_std rewards/even/mean loss grad_norm learning_rate entropy approx_kl
completions/mean_length completions/min_length completions/max_length completions/clipped_ratio stop/length
clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean weights/adapter_version weights/base_hash_ok
num_tokens lora/delta_norm lora/ab_norm lora/update_ratio moe/cpu_expert_frac
mismatch/masked_token_frac mismatch/masked_seq_frac mismatch/masked_by_length mismatch/correction_mean
perf/tokens_s perf/peak_ram_gb time/idle_cpu_frac time/backward time/optim
mismatch/logp_abs_max mismatch/logp_abs_mean mismatch/logp_abs_p99 mismatch/kl_k1 mismatch/kl_k3 mismatch/ess
mismatch/bitwise_equal_frac mismatch/is_mean mismatch/tokens
off_policy/version_lag_mean off_policy/version_lag_max off_policy/ratio_mean off_policy/ratio_max
off_policy/ess off_policy/kl_k3 off_policy/mixed_version_traj
moe/load_max_over_mean moe/load_entropy moe/experts_touched moe/routing_confidence moe/route_flip_rate
moe/tokens_with_any_flip moe/replayed_tokens moe/lora_grad_experts_frac
train/tokens train/samples train/groups train/groups_skipped
perf/rollout_tok_s perf/prefill_tok_s perf/decode_tok_s perf/train_tok_s kv/hit_rate kv/preemptions
time/rollout time/reward time/train time/step time/save
data/epoch data/prompts_seen data/prompts_too_long data/masked data/reward_errors data/reward_timeouts
data/rollout_errors
"""
"""Frozen: curves, reports and people's scripts read these names."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def base_hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the base's digest when the model was opened and when it was closed."""
    digests: list[str] = []
    original = run_parts.prepare_adapter

    def prepare(model: Any, *arguments: Any) -> None:
        digests.append(base_hash(model))
        original(model, *arguments)
        models.append(model)

    models: list[Any] = []
    saved = loop.save_adapter

    def save(model: Any, *arguments: Any) -> Any:
        digests.append(base_hash(model))
        return saved(model, *arguments)

    monkeypatch.setattr(run_parts, "prepare_adapter", prepare)
    monkeypatch.setattr(loop, "save_adapter", save)
    return digests


@pytest.mark.parametrize("staleness", [0, 1])
def test_reward_rises_on_one_copy_of_the_weights(
    staleness: int, small: Any, tmp_path: Path, base_hashes: list[str]
) -> None:
    steps = 15
    rl = {"group_size": 8, "prompts_per_step": 4, "max_staleness": staleness}
    recipe = small.recipe(train={"steps": steps, "lr": 0.01}, rl=rl)
    out = tmp_path / "run"
    assert loop.run(recipe, out) == steps
    metrics = lines(out / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, steps + 1))
    first, last = metrics[0]["reward"], statistics.mean(record["reward"] for record in metrics[-3:])
    assert first < 0.6
    assert last > first + 0.2
    before, after = lines(out / "eval.jsonl")
    assert (before["step"], after["step"]) == (0, steps)
    assert after["reward"] > before["reward"] + 0.15
    assert [record["mismatch/logp_abs_max"] for record in metrics] == [0.0] * steps
    assert len(base_hashes) == 2
    assert base_hashes[0] == base_hashes[1]
    assert (out / "adapter" / "adapter_config.json").is_file()
    assert (out / "adapter" / "adapter_model.safetensors").is_file()


def test_every_promised_metric_is_there(small: Any, tmp_path: Path) -> None:
    promised = set(METRICS.split())
    loop.run(small.recipe(), tmp_path / "run")
    for record in lines(tmp_path / "run" / "metrics.jsonl"):
        assert record.keys() >= promised, promised - record.keys()
        assert all(isinstance(value, (int, float)) for value in record.values())
    for record in lines(tmp_path / "run" / "eval.jsonl"):
        assert {"step", "accuracy", "samples", "masked", "reward", "time/eval"} <= record.keys()


def test_completions_say_what_was_asked_and_answered(small: Any, tmp_path: Path) -> None:
    loop.run(small.recipe(), tmp_path / "run")
    rows = lines(tmp_path / "run" / "completions.jsonl")
    assert len(rows) == 2 * 3 * 4
    for row in rows:
        assert row["prompt"].startswith("word ")
        assert 0 <= row["reward"] <= 1
        assert row["finish_reason"] in ("stop", "length")
        assert 1 <= row["num_tokens"] <= 8
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    for record in metrics:
        of_step = [row["reward"] for row in rows if row["step"] == record["step"]]
        assert record["reward"] == pytest.approx(statistics.mean(of_step), abs=1e-12)


def test_a_step_without_spread_changes_nothing_and_is_counted(small: Any, tmp_path: Path) -> None:
    recipe = small.recipe(rl=small.reward("constant"))
    loop.run(recipe, tmp_path / "run")
    for record in lines(tmp_path / "run" / "metrics.jsonl"):
        assert record["frac_reward_zero_std"] == 1.0
        assert record["train/groups_skipped"] == 3
        assert record["weights/adapter_version"] == 0
        assert record["grad_norm"] == 0.0
        assert record["mismatch/logp_abs_max"] == 0.0


def test_results_do_not_depend_on_engine_sizes_threads_or_log(small: Any, tmp_path: Path) -> None:
    loop.run(small.recipe(), tmp_path / "a")
    changed = small.recipe(
        engine={"max_num_seqs": 3, "prefill_chunk": 7, "kv_memory": "16MiB"},
        model={"threads": 2},
        log={"completions": 5, "samples": 0, "report": False},
    )
    loop.run(changed, tmp_path / "b")
    a, b = (lines(tmp_path / name / "metrics.jsonl") for name in "ab")
    for one, other in zip(a, b, strict=True):
        for name in ("reward", "loss", "grad_norm", "entropy", "completions/mean_length"):
            assert one[name] == other[name], name
    rows_a, rows_b = (lines(tmp_path / name / "completions.jsonl") for name in "ab")
    assert rows_a[:5] == rows_b[:5]
    assert len(rows_b) == 10
