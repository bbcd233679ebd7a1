"""Telling when a sequence is to end, and turning its tokens into text as they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders print for bytes that are not (yet) a character
_MAX_PENDING = 8  # tokens; a character has at most 4 bytes, so more of them pending are simply not UTF-8


class Decoder(Protocol):
    """The one method of a Transformers tokenizer that is used here."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


class Detokenizer:
    """Text of a growing token sequence, in pieces that hold whole characters only.

    A token's text can depend on the token before it (spaces, bytes of one character), so each new token is
    decoded together with the tokens of the piece before, and that piece's text is cut off again.
    """

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE) and len(self._pending) < _MAX_PENDING:
            return ""
        piece = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return piece

    def flush(self) -> str:
        """Text of what is still pending: replacement characters for an incomplete character."""
        piece = (
            self._decode(self._context + self._pending)[len(self._context_text) :] if self._pending else ""
        )
        self._context, self._context_text, self._pending = [], "", []
        return piece


class StopChecker:
    """Watches one sequence for stop ids and stop strings.

    Args:
        ids: token ids that end it.
        strings: texts that end it, wherever in the completion they appear; special tokens count with their
            text.
        tokenizer: needed only with strings.
    """

    __slots__ = ("_detokenizer", "_ids", "_longest", "_strings", "_tail")

    def __init__(
        self, ids: Collection[int], strings: Sequence[str] = (), tokenizer: Decoder | None = None
    ) -> None:
        self._ids = ids
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._tail = ""  # the end of the text so far in which a stop string may have begun
        self._detokenizer: Detokenizer | None = None
        if strings:
            assert tokenizer is not None, "stop strings need a tokenizer"
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)

    def check(self, token_id: int) -> int | str | None:
        """Take the next token; returns the id or string that ends the sequence, or None."""
        if token_id in self._ids:
            return token_id
        if self._detokenizer is None:
            return None
        text = self._tail + self._detokenizer.feed(token_id)
        found = [(place, string) for string in self._strings if (place := text.find(string)) >= 0]
        if found:
            return min(found)[1]
        self._tail = text[len(text) - self._longest + 1 :] if len(text) >= self._longest else text
        return None


class TextStream:
    """The text of a completion for a reader who watches: never a part of a stop string, no special tokens.

    Without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: Decoder | None, strings: Sequence[str]) -> None:
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=True) if tokenizer is not None else None
        )
        self._strings = strings
        self._held = ""  # not shown yet: it may turn out to be the beginning of a stop string

    def feed(self, token_id: int | None, *, last: bool = False) -> str:
        """The text to show after this token (None: one without text); if last, all up to a stop string."""
        if self._detokenizer is None:
            return ""
        text = self._held
        if token_id is not None:
            text += self._detokenizer.feed(token_id)
        if last:
            text += self._detokenizer.flush()
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)]
        keep = 0 if last else max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a beginning of `string`, less than all of it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
