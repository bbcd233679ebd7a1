"""A model to talk to in the terminal: opens it, streams its answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.cli.quiet import quiet_libraries
from hetero.data.chat import ChatRenderer
from hetero.engine.engine import Engine
from hetero.engine.params import SamplingParams
from hetero.errors import ModelError
from hetero.formats import AUTO
from hetero.recipe.sections.model import ModelSection
from hetero.run.opening import opened

_NAN = "Look for NaN in the weights: it may be the adapter's (try without --adapter) or the checkpoint's."
_CONTROL = {code: "\N{MIDDLE DOT}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def harmless(piece: str) -> str:
    """A model's text as it may be printed: to a terminal without the characters that it would obey."""
    return piece.translate(_CONTROL) if sys.stdout.isatty() else piece


@dataclass
class Talk:
    """An engine for one speaker. `sampled` are the ids of the last answer."""

    renderer: ChatRenderer
    engine: Engine
    params: SamplingParams
    sampled: list[int] = field(default_factory=list)
    finish_reason: str = ""
    _turn: int = 0

    @classmethod
    @contextmanager
    def open(
        cls,
        model: str,
        adapter: Path | None,
        *,
        experts: str = AUTO,
        max_tokens: int,
        sampling: dict[str, Any],
    ) -> Iterator[Talk]:
        """Load `model` with `adapter` for the time of the `with` block."""
        quiet_libraries()
        with opened(ModelSection(path=model, experts=experts), adapter=adapter) as loaded:
            stop_ids = loaded.renderer.stop_ids
            params = SamplingParams(max_tokens=max_tokens, stop_ids=stop_ids, **sampling)
            with Engine(loaded.model, tokenizer=loaded.tokenizer, max_num_seqs=1) as engine:
                yield cls(loaded.renderer, engine, params)

    def answer(self, ids: Sequence[int]) -> Iterator[str]:
        """The text that follows `ids`, in pieces as they are sampled. Raises ModelError for NaN in the
        logits."""
        self.sampled = []
        self._turn += 1
        for piece in self.engine.stream(ids, self.params, stream=(self._turn, 0)):
            if piece.token_id is not None:
                self.sampled.append(piece.token_id)
            if piece.completion is not None:
                self.finish_reason = piece.completion.finish_reason
                if self.finish_reason == "abort":
                    raise ModelError(f"The answer cannot go on: {piece.completion.message}. {_NAN}")
            yield piece.text
