"""Which columns of a row make the prompt, and which go on to the rewards."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero.data.dataset import Dataset
from hetero.data.files import Row
from hetero.data.messages import Prompt, check_messages
from hetero.errors import DataError

_PROMPTS = ("messages", "prompt", "question")


@dataclass(frozen=True)
class Columns:
    """How to read the rows of a data set.

    Attributes:
        prompt: the column that holds the prompt, text or messages; or, with braces in it, a template over the
            columns such as "{question} Answer briefly.". By default the first of the columns messages, prompt
            and question that there is.
        rename: new name -> column, for rewards that expect another name: {"answer": "solution"}.
    """

    prompt: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)

    def read(self, data: Dataset, index: int) -> tuple[Prompt, dict[str, Any]]:
        """(prompt, the other columns) of a row.

        A row without the prompt's column, with an empty prompt or with bad messages is a DataError that tells
        its place.
        """
        row, where = data[index], data.where(index)
        used, prompt = self._prompt(row, where)
        if isinstance(prompt, str):
            if not prompt.strip():
                raise DataError(f"{where}: the prompt (column {used!r}) is empty.")
        else:
            prompt = check_messages(prompt, where)
        columns = {name: value for name, value in row.items() if name != used}
        for new, old in self.rename.items():
            columns[new] = _value(row, old, where)
        return prompt, columns

    def _prompt(self, row: Row, where: str) -> tuple[str, Any]:
        if self.prompt is None:
            found = next((name for name in _PROMPTS if name in row), None)
            if found is None:
                raise DataError(
                    f"{where}: no column named {', '.join(_PROMPTS[:-1])} or {_PROMPTS[-1]}; there are "
                    f"{', '.join(row)}. Name the one to "
                    'ask, or write a template such as "{' + next(iter(row), "column") + '}".'
                )
            return found, row[found]
        if "{" not in self.prompt:
            return self.prompt, _value(row, self.prompt, where)
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None]
        except ValueError as error:
            raise self._bad_template(error) from None
        values = {
            name: _value(row, name, where) for name in (re.split(r"[.\[]", field)[0] for field in fields)
        }
        try:
            return "", self.prompt.format(**values)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise self._bad_template(error) from None

    def _bad_template(self, error: Exception) -> DataError:
        return DataError(
            f"The prompt template {self.prompt!r} is not valid ({error}). Write {{column}} for a column, "
            f"{{{{ and "
            "}} for braces."
        )


def _value(row: Row, name: str, where: str) -> Any:
    if name in row:
        return row[name]
    near = difflib.get_close_matches(name, row, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{where}: there is no column {name!r}; there are {', '.join(map(str, row))}.{hint}")
