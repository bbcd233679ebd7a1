"""`hetero generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from hetero.cli.talk import Talk, harmless
from hetero.data.messages import conversation


def run(
    model: str,
    prompt: str,
    adapter: Path | None,
    experts: str,
    system: str | None,
    raw: bool,
    max_tokens: int,
    sampling: dict[str, Any],
) -> None:
    """Print the answer to one prompt as its tokens come."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with Talk.open(model, adapter, experts=experts, max_tokens=max_tokens, sampling=sampling) as talk:
        ids = talk.renderer.plain(text) if raw else talk.renderer.prompt(conversation(text, system))
        for piece in talk.answer(ids):
            typer.echo(harmless(piece), nl=False)
        typer.echo()
