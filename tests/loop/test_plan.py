"""The plan, made from a configuration alone, against the model as it is then loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantised_checkpoints import save_fp8
from transformers import AutoModelForCausalLM

from hetero.errors import ModelError
from hetero.formats import packing
from hetero.models.builtin_config import builtin_config
from hetero.models.experts import HeteroExperts
from hetero.models.kv import KVPool
from hetero.models.load import load_model
from hetero.models.lora import bump_adapter_version, lora_parameters
from hetero.models.versions import keep_versions, kept_tensors, retain_version
from hetero.recipe.recipe import Recipe
from hetero.recipe.sections.model import ModelSection
from hetero.run.opening import opened, prepare_adapter
from hetero.run.plan import kv_bytes_per_token, memory_plan, readable


def recipe(path: Path | str, **lora: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "model": {"path": str(path)},
            "lora": lora,
            "data": {"train": "arithmetic"},
            "rl": {"rewards": ["last_number"]},
            "train": {"steps": 1},
            "engine": {"kv_memory": "3MiB", "kv_ram": "2MiB"},
        }
    )


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"expert_layout": "per_expert", "expert_rank": 2},
        {"targets": ["attention"], "rank": 3},
        {"targets": [".*q_proj", ".*experts.down_proj"]},
    ],
)
def test_adapter_is_counted_exactly(lora: dict[str, Any], tiny_moe_dir: Path) -> None:
    planned = memory_plan(recipe(tiny_moe_dir, **lora))
    model = load_model(tiny_moe_dir, device="cpu")
    prepare_adapter(model, recipe(tiny_moe_dir, **lora).lora, 0)
    assert planned.num_adapter == sum(p.numel() for p in lora_parameters(model).values())


def test_weights_and_cache_are_those_of_the_loaded_model(tiny_moe_dir: Path) -> None:
    planned = memory_plan(recipe(tiny_moe_dir))
    plain = AutoModelForCausalLM.from_pretrained(tiny_moe_dir)
    assert planned.num_weights == sum(p.numel() for p in plain.parameters())
    model = load_model(tiny_moe_dir, device="cpu")
    stores = [m.store for m in model.modules() if isinstance(m, HeteroExperts) and m.store is not None]
    assert planned.parts["experts"] == sum(store.nbytes for store in stores)
    assert kv_bytes_per_token(model.config) * 32 == KVPool.block_bytes(model)
    assert planned.parts["KV cache"] == 3 * 2**20
    assert planned.parts["KV blocks in RAM"] == 2 * 2**20
    assert planned.kv_tokens == 3 * 2**20 // KVPool.block_bytes(model) * 32
    assert planned.total == sum(planned.parts.values())


@pytest.mark.parametrize(
    "section",
    [
        {"experts": "int4", "group_size": 32, "symmetric": False},
        {"experts": "int4", "group_size": 64, "scale_search": "mse"},
        {"experts": "int8"},
    ],
)
def test_quantised_experts_are_opened_as_the_recipe_says(section: dict[str, Any], tiny_moe_dir: Path) -> None:
    wanted = recipe(tiny_moe_dir, **{})
    wanted = wanted.model_copy(
        update={"model": ModelSection(path=str(tiny_moe_dir), device="cpu", **section)}
    )
    how = packing(
        section["experts"],
        section.get("group_size"),
        section.get("symmetric"),
        section.get("scale_search", "max"),
    )
    with opened(wanted.model) as loaded:
        stores = [layer.mlp.experts.store for layer in loaded.model.model.layers]
    assert all(store.gate_up.packing == store.down.packing == how for store in stores)
    nbytes = sum(store.nbytes for store in stores)  # panels are padded to cache lines
    assert 0.97 * nbytes < memory_plan(wanted).parts["experts"] <= nbytes


def test_experts_in_codes_are_planned_as_they_ship(tmp_path: Path) -> None:
    shipped, _ = save_fp8("qwen3_moe", tmp_path, hidden_size=128, moe_intermediate_size=128)
    stores = [layer.mlp.experts.store for layer in load_model(shipped, device="cpu").model.layers]
    nbytes = sum(store.nbytes for store in stores)
    assert 0.97 * nbytes < memory_plan(recipe(shipped)).parts["experts"] <= nbytes


def test_a_config_file_is_enough(tmp_path: Path) -> None:
    config = builtin_config("quickstart")
    assert config is not None
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    assert memory_plan(recipe(tmp_path)).parts == memory_plan(recipe("quickstart")).parts
    assert memory_plan(recipe("smollm2-135m", targets=["mlp"])).num_expert_weights == 0


def test_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"config\.json is enough"):
        memory_plan(recipe(tmp_path / "gone"))


@pytest.mark.parametrize(("size", "text"), [(512, "0.5 KiB"), (3 * 2**20, "3.0 MiB"), (5 * 2**30, "5.0 GiB")])
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text


def test_older_versions_are_planned(tiny_moe_dir: Path) -> None:
    plain = recipe(tiny_moe_dir)
    stale = plain.model_copy(update={"rl": plain.rl.model_copy(update={"max_staleness": 2})})
    key = "older adapter versions"
    assert memory_plan(plain).parts[key] == 0
    model = load_model(tiny_moe_dir, device="cpu")
    prepare_adapter(model, stale.lora, 0)
    keep_versions(model, 3)
    for _ in range(4):
        retain_version(model)
        bump_adapter_version(model)
    kept = sum(tensor.nbytes for tensors in kept_tensors(model).values() for tensor in tensors.values())
    assert memory_plan(stale).parts[key] == 2 * kept, "as much again for the packed copies"
