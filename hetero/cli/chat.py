"""`hetero chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hetero.cli.talk import Talk, harmless
from hetero.data.messages import Message, conversation
from hetero.errors import CapacityError

_HELP = "/new starts over, /exit (or Ctrl-D) ends."


def run(
    model: str,
    adapter: Path | None,
    experts: str,
    system: str | None,
    max_tokens: int,
    sampling: dict[str, Any],
) -> None:
    """Read a line, stream the answer, and so on until /exit."""
    typer.echo(f"Loading {model} ...", err=True)
    with Talk.open(model, adapter, experts=experts, max_tokens=max_tokens, sampling=sampling) as talk:
        typer.echo(_HELP, err=True)
        ids: list[int] = []
        while (line := _ask()) is not None:
            if line == "/new":
                ids = []
                continue
            if line.startswith("/"):
                typer.echo(f"There is no command {line}. {_HELP}", err=True)
                continue
            ids = _say(talk, ids, conversation(line, None if ids else system))


def _ask() -> str | None:
    """The next line that is not empty; None at the end."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return None
        if line == "/exit":
            return None
        if line:
            return line


def _say(talk: Talk, ids: list[int], messages: list[Message]) -> list[int]:
    """Answer `messages` after the conversation `ids`; returns the whole conversation, ids only appended."""
    asked = ids + talk.renderer.turn(talk.sampled, messages) if ids else talk.renderer.prompt(messages)
    try:
        for piece in talk.answer(asked):
            typer.echo(harmless(piece), nl=False)
    except CapacityError as error:
        typer.echo(f"{error} /new starts over.", err=True)
        return ids
    except KeyboardInterrupt:
        pass
    typer.echo()
    return asked + talk.sampled
