"""A small run: a random model, prompts of a few letters, a reward that counts even tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hetero.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]

REWARDS = """
import time


def even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def constant(completions, **columns):
    return [1.0] * len(completions)


def never(completions, **columns):
    return [None] * len(completions)


def raises(completions, **columns):
    raise ZeroDivisionError("the judge is out")


def raises_from_step_3(completion_ids, trainer_state, **columns):
    if trainer_state.global_step >= 3:
        raise ZeroDivisionError("the judge is out")
    return even(completion_ids)


def hangs(completions, **columns):
    time.sleep(3600)


def hangs_on_long_ones(completion_ids, **columns):
    if len(completion_ids[0]) >= 6:
        time.sleep(3600)
    return even(completion_ids)
"""


class Small:
    """Makes recipes for the small run in its own directory."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.rewards = folder / "rewards.py"
        self.rewards.write_text(REWARDS, encoding="utf-8")
        self.data = folder / "train.jsonl"
        self.write_data([f"word {letter}" for letter in "abcdefgh"])
        held_out = folder / "test.jsonl"
        rows = [json.dumps({"prompt": f"word {letter}"}) for letter in "xyz"]
        held_out.write_text("\n".join(rows), encoding="utf-8")
        self.tree: dict[str, Any] = {
            "model": {"path": str(model), "device": "cpu", "threads": 1},
            "lora": {"rank": 8, "alpha": 16.0},
            "engine": {"kv_memory": "8MiB", "max_num_seqs": 16},
            "data": {"train": str(self.data), "eval": str(held_out)},
            "rl": {
                "rewards": [f"{self.rewards}:even"],
                "group_size": 4,
                "prompts_per_step": 3,
                "max_tokens": 8,
                "reward_timeout": 20.0,
            },
            "train": {"steps": 2, "lr": 0.01, "micro_batch_tokens": 96},
            "eval": {"samples": 2},
        }

    def write_data(self, prompts: list[str]) -> None:
        text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        self.data.write_text(text, encoding="utf-8")

    def recipe(self, **sections: dict[str, Any]) -> Recipe:
        """The small recipe with some keys changed: `rl={"group_size": 8}`."""
        merged = {name: {**section, **sections.get(name, {})} for name, section in self.tree.items()}
        return Recipe.from_dict({**sections, **merged})

    def reward(self, name: str) -> dict[str, Any]:
        """Recipe keys that make `name` of the rewards file the reward."""
        return {"rewards": [f"{self.rewards}:{name}"]}

    def file(self, **sections: dict[str, Any]) -> Path:
        """The recipe as a file."""
        path = self.folder / "small.yaml"
        path.write_text(self.recipe(**sections).to_yaml(), encoding="utf-8")
        return path


@pytest.fixture(scope="session")
def lively_dir(tiny_moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model with a head ten times as large: an untrained head is so near to uniform that no
    adapter could make it choose."""
    directory = tmp_path_factory.mktemp("lively-moe")
    shutil.copytree(tiny_moe_dir, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 10
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def small(tmp_path: Path, lively_dir: Path) -> Small:
    return Small(tmp_path, lively_dir)


Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hetero(tmp_path: Path) -> Command:
    """Starts `hetero ...` as a process of its own, in `tmp_path`."""

    def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hetero.cli", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
