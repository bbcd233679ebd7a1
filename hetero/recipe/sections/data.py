"""Section `data`: where the tasks come from and how a row becomes a prompt."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hetero.recipe.sections.base import Section


class DataSection(Section):
    """The tasks. Order depends on `train.seed` only: every epoch is a fresh permutation."""

    train: str = Field(min_length=1)
    """A generator (`arithmetic`, `instructions`), a file (.jsonl, .json, .csv, .parquet ...), a glob, a
    directory with one file per split, or `hub:owner/name`."""
    eval: str | None = None
    """Held-out tasks, same forms. A generator, directory or hub name gives its held-out split, never training
    rows."""
    held_out: float | None = Field(default=None, gt=0, lt=1)
    """Without `eval`: split this share of the training rows off, by content. Without either there is no
    evaluation."""
    options: dict[str, Any] = Field(default={})
    """Arguments of the generator, or of the hub's loader."""
    limit: int | None = Field(default=None, ge=1)
    """Keep only the first rows of `train`."""
    prompt: str | None = None
    """The column to ask, or with braces a template over columns, such as `"{question} Answer briefly."`; by
    default the first there is of `messages`, `prompt` and `question`."""
    rename: dict[str, str] = Field(default={})
    """New name: column, for rewards that expect another name, such as `answer: solution`."""
    system: str | None = None
    """A system message put before every prompt."""
    plain: bool = False
    """Continue the prompt as it stands, without a chat template: for base models."""
    template: str | None = None
    """A chat template in place of the tokenizer's own: Jinja text, or the path of a file that holds it."""
    chat: dict[str, Any] = Field(default={})
    """Extra variables of the chat template, such as `enable_thinking`."""
