"""What goes wrong is one paragraph that says how to fix it, or a counted skip; no finished step is lost."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero import loop
from hetero.errors import CapacityError, DataError, HeteroError, ModelError, RewardError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fails(recipe: Any, out: Path, kind: type[HeteroError], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        loop.run(recipe, out)
    for part in parts:
        assert part in str(caught.value)


def test_a_reward_that_raises(small: Any, tmp_path: Path) -> None:
    recipe = small.recipe(rl=small.reward("raises"))
    fails(recipe, tmp_path / "run", RewardError, "6 of 6", "the judge is out", "fix the function")


def test_a_reward_that_raises_later_loses_no_finished_step(small: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = small.recipe(rl=small.reward("raises_from_step_3"), train={"steps": 4, "save_every": 10})
    fails(recipe, out, RewardError, "the judge is out")
    assert [record["step"] for record in lines(out / "metrics.jsonl")] == [1, 2]
    assert (out / "checkpoints" / "step-2").is_dir()
    text = small.rewards.read_text(encoding="utf-8").replace(
        'raise ZeroDivisionError("the judge is out")', "pass"
    )
    small.rewards.write_text(text, encoding="utf-8")
    assert loop.run(recipe, out, resume=True) == 4
    straight = small.recipe(rl=small.reward("even"), train={"steps": 4})
    loop.run(straight, tmp_path / "straight")
    one, other = (tmp_path / name / "checkpoints" / "step-4" for name in ("run", "straight"))
    names = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert names
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_reward_that_hangs(small: Any, tmp_path: Path) -> None:
    recipe = small.recipe(
        rl={**small.reward("hangs"), "reward_timeout": 0.5, "prompts_per_step": 1, "group_size": 2}
    )
    fails(recipe, tmp_path / "run", RewardError, "timeout")


def test_a_reward_that_sometimes_hangs_masks_its_samples(small: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = {**small.reward("hangs_on_long_ones"), "reward_timeout": 0.5, "max_failed": 1.0, "group_size": 3}
    loop.run(small.recipe(rl={**keys, "prompts_per_step": 1}, train={"steps": 1}, data={"eval": None}), out)
    record = lines(out / "metrics.jsonl")[0]
    rows = lines(out / "completions.jsonl")
    hung = [row for row in rows if row["num_tokens"] >= 6]
    assert hung
    assert record["data/reward_timeouts"] == len(hung)
    assert all(row["reward"] is None and "timeout" in row["error"] for row in hung)


def test_a_reward_file_that_cannot_be_imported(small: Any, tmp_path: Path) -> None:
    small.rewards.write_text("import nothing_of_that_name\n\ndef even(completions): ...\n", encoding="utf-8")
    fails(small.recipe(), tmp_path / "run", RewardError, "nothing_of_that_name")


def test_a_reward_that_needs_another_column(small: Any, tmp_path: Path) -> None:
    small.rewards.write_text("def even(completions, answr): ...\n", encoding="utf-8")
    fails(small.recipe(), tmp_path / "run", RewardError, "'answr'")


def test_no_data_file(small: Any, tmp_path: Path) -> None:
    fails(small.recipe(data={"train": "gone.jsonl"}), tmp_path / "run", DataError, "gone.jsonl")


def test_an_empty_data_set(small: Any, tmp_path: Path) -> None:
    small.data.write_text("", encoding="utf-8")
    fails(small.recipe(), tmp_path / "run", DataError, "empty")


def test_no_model(small: Any, tmp_path: Path) -> None:
    gone = tmp_path / "no-model"
    fails(small.recipe(model={"path": str(gone)}), tmp_path / "run", ModelError, str(gone))
    gone.mkdir()
    fails(small.recipe(model={"path": str(gone)}), tmp_path / "other", ModelError, "config.json")


def test_a_prompt_longer_than_the_context_is_counted_and_left_out(small: Any, tmp_path: Path) -> None:
    small.write_data(["word a", "b" * 600, "word c"])
    out = tmp_path / "run"
    loop.run(small.recipe(), out)
    assert [record["data/prompts_too_long"] for record in lines(out / "metrics.jsonl")] == [1, 1]
    assert {row["prompt"] for row in lines(out / "completions.jsonl")} == {"word a", "word c"}


def test_only_prompts_longer_than_the_context(small: Any, tmp_path: Path) -> None:
    small.write_data(["b" * 600])
    fails(small.recipe(), tmp_path / "run", DataError, "1 of 1 prompts")


def test_completions_longer_than_the_context(small: Any, tmp_path: Path) -> None:
    recipe = small.recipe(rl={"max_tokens": 600}, train={"micro_batch_tokens": 2048})
    fails(recipe, tmp_path / "run", CapacityError, "rl.max_tokens is 600", "512")


def test_more_tokens_than_the_kv_cache_holds(small: Any, tmp_path: Path) -> None:
    fails(
        small.recipe(engine={"kv_memory": "20KiB"}, rl={"max_tokens": 40}),
        tmp_path / "run",
        CapacityError,
        "kv_memory",
    )


def test_a_target_that_reaches_nothing(small: Any, tmp_path: Path) -> None:
    fails(small.recipe(lora={"targets": [".*nothing.*"]}), tmp_path / "run", ModelError, ".*nothing.*")


def test_a_start_that_failed_leaves_a_directory_that_can_be_resumed(small: Any, tmp_path: Path) -> None:
    text = small.data.read_text(encoding="utf-8")
    small.data.write_text("", encoding="utf-8")
    out = tmp_path / "run"
    fails(small.recipe(), out, DataError)
    small.data.write_text(text, encoding="utf-8")
    assert loop.run(small.recipe(), out, resume=True) == 2


def with_weights(model: str, to: Path, change: Callable[[dict[str, Tensor]], None]) -> dict[str, Any]:
    """Recipe keys of a copy of `model` whose tensors `change` has been at."""
    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return {"path": str(to)}


def test_weights_that_are_nan_do_not_run_to_the_end(small: Any, tmp_path: Path) -> None:
    path = small.tree["model"]["path"]

    def poison(name: str) -> Callable[[dict[str, Tensor]], None]:
        return lambda tensors: tensors[name].view(-1)[5].fill_(math.nan)

    head = with_weights(path, tmp_path / "head", poison("lm_head.weight"))
    fails(small.recipe(model=head), tmp_path / "run", ModelError, "gave up 6 of 6 answers", "NaN")
    norm = with_weights(path, tmp_path / "norm", poison("model.norm.weight"))
    fails(small.recipe(model=norm), tmp_path / "other", ModelError, "NaN or infinite hidden states")
    experts = next(name for name in load_file(Path(path) / "model.safetensors") if ".experts." in name)
    codes = {**with_weights(path, tmp_path / "experts", poison(experts)), "experts": "int4"}
    fails(small.recipe(model=codes), tmp_path / "third", ModelError, "model.layers.0.mlp.experts", "NaN")


def test_an_adapter_that_diverges_stops_the_run_and_keeps_what_is_finished(
    small: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    recipe = small.recipe(train={"lr": 1e30, "steps": 9, "save_every": 100}, data={"eval": None})
    fails(recipe, out, ModelError, "diverged: lower train.lr")
    steps = [record["step"] for record in lines(out / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert (out / "checkpoints" / f"step-{len(steps)}").is_dir()


def test_a_checkpoint_that_is_not_whole(small: Any, tmp_path: Path) -> None:
    path = small.tree["model"]["path"]
    gone, torn = tmp_path / "gone", tmp_path / "torn"
    for copy in (gone, torn):
        shutil.copytree(path, copy)
    (gone / "model.safetensors").unlink()
    fails(
        small.recipe(model={"path": str(gone)}), tmp_path / "1", ModelError, "no file named model.safetensors"
    )
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    fails(small.recipe(model={"path": str(torn)}), tmp_path / "2", ModelError, str(torn), "fetch")

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 64)

    odd = with_weights(path, tmp_path / "odd", cut)
    fails(small.recipe(model=odd), tmp_path / "3", ModelError, str(tmp_path / "odd"))


def test_a_model_without_a_tokenizer(small: Any, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(small.tree["model"]["path"], copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    fails(small.recipe(model={"path": str(copy)}), tmp_path / "run", ModelError, "okenizer")


def test_answers_without_any_reward_are_told_from_equal_ones(
    small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop.run(small.recipe(rl=small.reward("never"), train={"steps": 1}), tmp_path / "run")
    assert "no answer has a reward" in caplog.text
    loop.run(small.recipe(rl=small.reward("constant"), train={"steps": 1}), tmp_path / "other")
    assert "the rewards of every group are all equal" in caplog.text
