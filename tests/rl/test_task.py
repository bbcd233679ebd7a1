from __future__ import annotations

import logging

import pytest

from hetero.data.chat import ChatRenderer
from hetero.data.columns import Columns
from hetero.data.dataset import Dataset
from hetero.errors import CapacityError, DataError
from hetero.rl.task import fitting, tasks_of

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}


def _data(*rows: dict) -> Dataset:
    return Dataset([(row, f"d.jsonl line {i}") for i, row in enumerate(rows, 1)], "d")


def test_text_prompts_become_a_turn_and_replies_stay_text(tiny_tokenizer):
    (task,) = tasks_of(_data({"prompt": "2+2?", "answer": 4}))
    assert (task.prompt, task.messages, task.columns, task.index) == ("2+2?", [USER], {"answer": 4}, 0)
    assert task.reply("4") == "4"
    assert tasks_of(_data({"prompt": "2+2?"}), system="Be brief.")[0].messages == [SYSTEM, USER]
    renderer = ChatRenderer(tiny_tokenizer)
    assert tiny_tokenizer.decode(task.token_ids(renderer)).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    (plain,) = tasks_of(_data({"prompt": "2+2="}), chat=False)
    assert plain.messages is None
    assert tiny_tokenizer.decode(plain.token_ids(renderer)) == "2+2="


def test_conversations_stay_conversations():
    (task,) = tasks_of(_data({"messages": [USER]}), system="Be brief.")
    assert task.messages == [SYSTEM, USER]
    assert task.prompt == [USER], "rewards see what the data set has"
    assert task.reply("4") == [{"role": "assistant", "content": "4"}]
    other = {"role": "system", "content": "Be long."}
    assert tasks_of(_data({"messages": [other, USER]}), system="Be brief.")[0].messages == [other, USER]


def test_columns_and_places():
    rows = _data({"q": "2+2?", "gold": 4}, {"q": " ", "gold": 5})
    with pytest.raises(DataError, match=r"d\.jsonl line 2: the prompt"):
        tasks_of(rows, Columns(prompt="q"))
    (task,) = tasks_of(rows[:1], Columns(prompt="{q} Answer briefly.", rename={"answer": "gold"}))
    assert task.prompt == "2+2? Answer briefly."
    assert task.columns["answer"] == 4


def test_long_prompts_are_counted_or_refused_and_never_cut(tiny_tokenizer, caplog):
    renderer = ChatRenderer(tiny_tokenizer)
    tasks = tasks_of(_data({"prompt": "short"}, {"prompt": "x" * 100}, {"prompt": "y" * 300}))
    lengths = [len(task.token_ids(renderer)) for task in tasks]
    assert fitting(tasks, renderer, lengths[2]) == tasks
    with caplog.at_level(logging.WARNING):
        assert fitting(tasks, renderer, lengths[0]) == tasks[:1]
    assert "2 of 3 prompts have more than" in caplog.text
    assert f"the longest has {lengths[2]} (d.jsonl line 3)" in caplog.text
    with pytest.raises(CapacityError, match="1 of 3 prompts"):
        fitting(tasks, renderer, lengths[1], on_long="error")
    with pytest.raises(DataError, match="None is left"):
        fitting(tasks, renderer, lengths[0] - 1)
