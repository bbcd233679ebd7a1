"""Prompts on their way to completions, while other calls use the engine too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero.engine.sequence import Completion
from hetero.engine.sequence import Sequence as Running


class Generation:
    """What `Engine.begin` returns. Its sequences move whenever anybody steps the engine.

    Args:
        sequences: one per prompt, in order.
        on_token: called with (index of the prompt, token id) as tokens come.
        on_finish: called with (index of the prompt, completion) as sequences end.
    """

    def __init__(
        self,
        sequences: Sequence[Running],
        on_token: Callable[[int, int], None] | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> None:
        self.sequences = list(sequences)
        self._on_token = on_token
        self._on_finish = on_finish

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.completion is not None for sequence in self.sequences)

    @property
    def completions(self) -> list[Completion]:
        """Of the sequences that have ended, in the order of the prompts."""
        return [sequence.completion for sequence in self.sequences if sequence.completion is not None]

    def hear(self, sequence: Running) -> None:
        """One of the sequences got a token, or ended."""
        done = sequence.completion
        aborted = done is not None and done.finish_reason == "abort"
        if self._on_token is not None and not aborted:
            self._on_token(sequence.index, sequence.token_ids[-1])
        if self._on_finish is not None and done is not None:
            self._on_finish(sequence.index, done)
