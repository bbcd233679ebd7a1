"""The tasks of a run: training and held-out ones, and which of them fit."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.data.chat import ChatRenderer
from hetero.data.columns import Columns
from hetero.data.dataset import load_dataset
from hetero.errors import CapacityError
from hetero.recipe.sections.data import DataSection
from hetero.rl.task import Task, fitting, tasks_of


@dataclass(frozen=True)
class RunTasks:
    """What is trained on and what is held out.

    Attributes:
        train, held_out: the tasks; held_out is empty when the recipe names none.
        num_too_long: training tasks that were left out because their prompt leaves no room for a completion.
    """

    train: list[Task]
    held_out: list[Task]
    num_too_long: int = 0

    @property
    def columns(self) -> set[str]:
        """Columns that every row has: what reward functions can count on."""
        return set.intersection(*(set(task.columns) for task in (*self.train, *self.held_out)))

    def fit(self, renderer: ChatRenderer, context: float, max_tokens: int, max_eval_tokens: int) -> RunTasks:
        """Only the tasks whose prompt and completion together fit into the model's `context`.

        Raises CapacityError when a completion alone does not, DataError when no task is left.
        """
        for key, tokens in (("rl.max_tokens", max_tokens), ("eval.max_tokens", max_eval_tokens)):
            if tokens >= context:
                raise CapacityError(
                    f"{key} is {tokens}, but the model's context holds {context:.0f} tokens, prompt "
                    "included: lower it."
                )
        train = fitting(self.train, renderer, _room(context, max_tokens))
        held_out = self.held_out and fitting(self.held_out, renderer, _room(context, max_eval_tokens))
        return RunTasks(train, held_out, len(self.train) - len(train))


def load_tasks(section: DataSection, num_held_out: int | None = None) -> RunTasks:
    """Read the data that a recipe names. Raises DataError, UnavailableError."""
    columns = Columns(section.prompt, section.rename)
    data = load_dataset(section.train, options=section.options, limit=section.limit)
    held_out = None
    if section.eval is not None:
        options = section.options if section.eval == section.train else {}
        held_out = load_dataset(section.eval, split="held_out", options=options)
    elif section.held_out is not None:
        data, held_out = data.split(section.held_out)
    system, chat = section.system, not section.plain
    train = tasks_of(data, columns, system=system, chat=chat)
    if held_out is None:
        return RunTasks(train, [])
    return RunTasks(train, tasks_of(held_out[:num_held_out], columns, system=system, chat=chat))


def _room(context: float, max_tokens: int) -> int:
    return int(min(context, 2**31)) - max_tokens
