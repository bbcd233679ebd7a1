"""Tasks: what the model is asked, and what the rewards need to know about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetero.data.chat import ChatRenderer
from hetero.data.columns import Columns
from hetero.data.dataset import Dataset
from hetero.data.messages import Message, Prompt, conversation
from hetero.errors import CapacityError, DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One row of a data set as a question.

    Attributes:
        prompt: as the data set has it, text or messages; reward functions see it in this form, and
            completions likewise.
        messages: the conversation that the model is to go on with; None when it is to continue the text of
            the prompt.
        columns: the row's other columns, for the reward functions.
        index: number of the row.
        where: place of the row, for messages.
    """

    prompt: Prompt
    messages: list[Message] | None
    columns: dict[str, Any]
    index: int
    where: str = ""

    def token_ids(self, renderer: ChatRenderer) -> list[int]:
        """The prompt's token ids."""
        return renderer.plain(str(self.prompt)) if self.messages is None else renderer.prompt(self.messages)

    def reply(self, text: str) -> Prompt:
        """What the model said, in the form in which reward functions expect it next to this prompt."""
        return text if isinstance(self.prompt, str) else [{"role": "assistant", "content": text}]


def tasks_of(
    data: Dataset, columns: Columns | None = None, *, system: str | None = None, chat: bool = True
) -> list[Task]:
    """A task for every row.

    Args:
        columns: which column is the prompt.
        system: a system message to put first; a conversation that begins with one of its own keeps that.
        chat: ask text prompts as one user turn. False: the model continues the text (for models without a
            chat template).

    Raises DataError for a row that cannot be asked, with its place.
    """
    tasks = []
    for index in range(len(data)):
        prompt, others = (columns or Columns()).read(data, index)
        messages: list[Message] | None
        if isinstance(prompt, str):
            messages = conversation(prompt, system) if chat else None
        elif system and prompt[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *prompt]
        else:
            messages = prompt
        tasks.append(Task(prompt, messages, others, index, data.where(index)))
    return tasks


def fitting(
    tasks: Sequence[Task],
    renderer: ChatRenderer,
    max_prompt_tokens: int,
    *,
    on_long: Literal["skip", "error"] = "skip",
) -> list[Task]:
    """The tasks whose prompt has at most `max_prompt_tokens` tokens. No prompt is ever cut.

    Those that are left out are told in one warning; the difference in length is their number.

    Raises:
        CapacityError: on_long is "error" and a prompt is too long.
        DataError: all are too long.
    """
    kept, long = [], []
    for task in tasks:
        num_tokens = len(task.token_ids(renderer))
        if num_tokens <= max_prompt_tokens:
            kept.append(task)
        else:
            long.append((num_tokens, task))
    if not long:
        return kept
    num_tokens, longest = max(long, key=lambda item: item[0])
    found = (
        f"{len(long)} of {len(tasks)} prompts have more than the {max_prompt_tokens} tokens that leave room "
        f"for the completion in the model's context; the longest has {num_tokens} ({longest.where})"
    )
    if on_long == "error":
        raise CapacityError(f"{found}. Shorten them, lower the tokens of a completion, or skip such prompts.")
    if not kept:
        raise DataError(f"{found}. None is left: shorten them or lower the tokens of a completion.")
    _log.warning("%s; they are left out", found)
    return kept
