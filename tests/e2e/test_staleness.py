"""Several adapter versions in flight: what is sampled, what is compared, and going on after a kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from left_behind import STEPS, assert_same, finished_steps, state, wait_for

from hetero import loop
from hetero.run.metrics import SCHEDULE


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def said(out: Path, step: int) -> list[list[Any]]:
    rows = map(json.loads, (out / "completions.jsonl").read_text().splitlines())
    return [[row["serial"], row["sample"], row["completion"]] for row in rows if row["step"] == step]


def settled(out: Path) -> dict[str, Any]:
    """`state` without what depends on how far the next steps' answers had come."""
    found = state(out)
    found["metrics"] = [
        {k: v for k, v in record.items() if not k.startswith(SCHEDULE)} for record in found["metrics"]
    ]
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_step_is_sampled_so_many_updates_before_it_is_trained(
    staleness: int, small: Any, tmp_path: Path
) -> None:
    rl = {"max_staleness": staleness}
    loop.run(small.recipe(rl=rl, train={"steps": 4}), tmp_path / "run")
    loop.run(small.recipe(rl=rl, train={"steps": 4, "lr": 1e-30}), tmp_path / "still")
    records = metrics(tmp_path / "run")
    for step, record in enumerate(records, 1):
        lag = min(staleness, step - 1)
        assert record["mismatch/logp_abs_max"] == 0.0
        assert record["mismatch/bitwise_equal_frac"] == 1.0
        assert record["mismatch/tokens"] > 0
        assert record["off_policy/version_lag_mean"] == record["off_policy/version_lag_max"] == lag
        assert (record["off_policy/ess"] == 1.0) == (lag == 0)
        assert record["weights/adapter_version"] == step
        assert record["data/prompts_seen"] == 3 * step
        unchanged = said(tmp_path / "run", step) == said(tmp_path / "still", step)
        assert unchanged == (step <= staleness + 1), "the first steps are sampled with the fresh adapter"


def test_how_the_engine_is_scheduled_changes_no_bit(small: Any, tmp_path: Path) -> None:
    found = []
    for number, engine in enumerate(({}, {"max_num_seqs": 3}, {"prefill_chunk": 7, "max_num_seqs": 5})):
        out = tmp_path / str(number)
        loop.run(small.recipe(rl={"max_staleness": 1}, train={"steps": STEPS}, engine=engine), out)
        found.append(settled(out))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.fixture
def straight(small: Any, tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "straight"
    loop.run(small.recipe(rl={"max_staleness": 1}, train={"steps": STEPS}, eval={"every": 2}), out)
    assert list((out / "checkpoints" / f"step-{STEPS}").rglob("version-*.safetensors"))
    return settled(out)


def test_killed_with_two_versions_in_flight(
    small: Any, straight: dict[str, Any], hetero: Any, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    recipe = small.file(rl={"max_staleness": 1}, train={"steps": STEPS}, eval={"every": 2})
    for number in (1, 3):
        process = hetero("rl", recipe, "--out", out, "--resume")
        wait_for(process, lambda number=number: finished_steps(out) >= number)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert finished_steps(out) < STEPS
    process = hetero("rl", recipe, "--out", out, "--resume")
    _, wrong = process.communicate(timeout=300)
    assert process.returncode == 0, wrong
    assert_same(settled(out), straight)


def test_more_steps_go_on_with_what_was_due(small: Any, straight: dict[str, Any], tmp_path: Path) -> None:
    """A shorter run begins nothing after its end; the longer one samples that under the older version."""
    out = tmp_path / "longer"
    for steps in (1, 4, STEPS):
        recipe = small.recipe(rl={"max_staleness": 1}, train={"steps": steps}, eval={"every": 2})
        loop.run(recipe, out, resume=steps > 1)
    assert {k: v for k, v in settled(out).items() if k != "eval"} == {
        k: v for k, v in straight.items() if k != "eval"
    }


def test_reinforce_weighs_older_samples(small: Any, tmp_path: Path) -> None:
    loop.run(small.recipe(rl={"max_staleness": 1, "algorithm": "rloo"}, train={"steps": 3}), tmp_path / "run")
    records = metrics(tmp_path / "run")
    assert [record["mismatch/logp_abs_max"] for record in records] == [0.0] * 3
    assert records[-1]["off_policy/ratio_max"] != 1.0


def test_a_correction_weighs_older_samples_and_no_others(small: Any, tmp_path: Path) -> None:
    names = ("masked_token_frac", "masked_seq_frac", "masked_by_length", "correction_mean")
    rl = {"correction": "token_mask", "correction_low": 0.9999, "correction_high": 1.0001}
    found = {}
    for name, more in (("plain", {}), ("fresh", rl), ("stale", {**rl, "max_staleness": 1})):
        loop.run(small.recipe(rl=more, train={"steps": 3}), tmp_path / name)
        found[name] = [[r[f"mismatch/{n}"] for n in names] for r in metrics(tmp_path / name)]
    assert found["plain"] == found["fresh"] == [[0, 0, 0, 1]] * 3
    adapter = "adapter/adapter_model.safetensors"
    assert (tmp_path / "plain" / adapter).read_bytes() == (tmp_path / "fresh" / adapter).read_bytes()
    assert found["stale"][0] == [0, 0, 0, 1]
    # So narrow that all of step 2 is masked: the adapter stays, and step 3 is of its version again.
    assert found["stale"][1:] == [[1, 1, 1, 0], [0, 0, 0, 1]]


@pytest.mark.slow
def test_300_steps_with_two_versions_in_flight(small: Any, tmp_path: Path) -> None:
    train = {"steps": 300, "save_every": 100}
    loop.run(small.recipe(rl={"max_staleness": 1}, train=train, log={"completions": 0}), tmp_path / "run")
    records = metrics(tmp_path / "run")
    assert len(records) == 300
    for record in records:
        assert record["kv/stale_refused"] == 0
        assert record["off_policy/version_lag_max"] <= 1
        assert record["off_policy/mixed_version_traj"] == record["data/rollout_errors"] == 0
        assert record.get("mismatch/logp_abs_max", 0.0) == 0.0
    assert sum("mismatch/logp_abs_max" in record for record in records) > 250
