"""What a recipe's data section makes: training tasks, held-out tasks, and which of them fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.data.chat import ChatRenderer
from hetero.errors import CapacityError, DataError
from hetero.recipe.sections.data import DataSection
from hetero.run.tasks import load_tasks


def write(path: Path, *prompts: str, **columns: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": p, **columns}) + "\n" for p in prompts), encoding="utf-8")
    return str(path)


def test_a_generator_keeps_its_held_out_rows_apart() -> None:
    tasks = load_tasks(DataSection(train="arithmetic", eval="arithmetic", options={"digits": 1}), 5)
    assert len(tasks.held_out) == 5
    assert not {str(t.prompt) for t in tasks.train} & {str(t.prompt) for t in tasks.held_out}
    assert {"answer", "a", "b"} <= tasks.columns


def test_a_share_of_a_file_can_be_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *(f"question {i}" for i in range(40)))
    tasks = load_tasks(DataSection(train=path, held_out=0.25))
    assert len(tasks.train) + len(tasks.held_out) == 40
    assert 3 <= len(tasks.held_out) <= 20


def test_options_belong_to_the_training_source(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", "a question", answer="1")
    tasks = load_tasks(DataSection(train="arithmetic", eval=path, options={"digits": 2}))
    assert [task.prompt for task in tasks.held_out] == ["a question"]
    assert tasks.columns == {"answer"}, "columns that every row has"


def test_prompts_are_templates_messages_or_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "2 + 2", "answer": "4"}) + "\n", encoding="utf-8")
    section = DataSection(
        train=str(path), prompt="{question} = ?", system="Be brief.", rename={"gold": "answer"}
    )
    (task,) = load_tasks(section).train
    assert task.messages is not None
    assert [m["role"] for m in task.messages] == ["system", "user"]
    assert task.messages[1]["content"] == "2 + 2 = ?"
    assert task.columns["gold"] == "4"
    (plain,) = load_tasks(DataSection(train=str(path), prompt="{question} = ?", plain=True)).train
    assert plain.messages is None


def test_what_does_not_fit_is_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", "short", "x" * 100)
    renderer = ChatRenderer(tiny_tokenizer)
    tasks = load_tasks(DataSection(train=path, eval=path))
    assert tasks.fit(renderer, 500, 50, 50).num_too_long == 0
    fitting = tasks.fit(renderer, 110, 50, 20)
    assert [task.prompt for task in fitting.train] == ["short"]
    assert (fitting.num_too_long, len(fitting.held_out)) == (1, 1)
    with pytest.raises(CapacityError, match=r"eval\.max_tokens is 110"):
        tasks.fit(renderer, 110, 50, 110)
    with pytest.raises(DataError, match="2 of 2 prompts"):
        tasks.fit(renderer, 30, 20, 20)
