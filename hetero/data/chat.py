"""From messages to token ids, once: afterwards ids are only ever appended, never decoded and encoded
again."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.data.messages import Message
from hetero.errors import DataError

_MARK = "\u2063hetero\u2063"
"""Stands for the assistant's words when only the text after them is wanted."""


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: a Transformers tokenizer.
        template: a Jinja chat template, or the path of a file that holds one, in place of the tokenizer's
            own.
        variables: extra variables of the template, such as {"enable_thinking": False}.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | Path | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._template = _read_template(template)
        self._lock = threading.RLock()  # a fast tokenizer refuses to be used by two threads at once
        self._prefix = self._special_prefix()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a conversation up to where the assistant's next words begin.

        A beginning-of-sequence token that the tokenizer puts before plain text is there exactly once, whether
        the template writes it or not. Raises DataError when there is no template or it rejects the messages.
        """
        return self._begin(self._encode(self._render(messages, tools)))

    def plain(self, text: str) -> list[int]:
        """Token ids of a text as it stands, for a model that continues text instead of answering."""
        return self._begin(self._encode(text))

    def turn(
        self, sampled: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """The ids to append after an assistant's `sampled` ids so that it can answer the new `messages`.

        What was sampled stays as it is. If it did not end its turn itself (it was cut off), the ids that end
        it come first.
        """
        tail = self._encode(self._tail(messages, tools))
        return tail[1:] if sampled and tail and sampled[-1] == tail[0] else tail

    def text(self, ids: Sequence[int]) -> str:
        """The words that sampled ids stand for, without special tokens: for rewards and for people, never for
        the model."""
        with self._lock:
            return str(
                self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids after which the assistant has said all: the tokenizer's end-of-sequence and the template's
        end-of-turn token."""
        ids = {self.tokenizer.eos_token_id} - {None}
        if self._template or getattr(self.tokenizer, "chat_template", None):
            tail = self._encode(self._tail([{"role": "user", "content": "x"}], None))
            ids.update(tail[:1] if tail and tail[0] in self.tokenizer.all_special_ids else [])
        return tuple(sorted(ids))

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        template = self._template or getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise DataError(
                "This model's tokenizer has no chat template, so messages cannot be rendered. Use an "
                "instruction-tuned model, give a "
                "template (a Jinja text or file), or use plain text prompts."
            )
        named = {"chat_template": self._template} if self._template else {}
        try:
            with self._lock:
                text = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) if tools else None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **named,
                    **self._variables,
                )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"The chat template cannot render messages of the roles {roles}: {error}."
            ) from error
        return str(text)

    def _tail(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """What the template writes after an assistant's words when `messages` follow."""
        before: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        _, mark, tail = self._render([*before, *messages], tools).rpartition(_MARK)
        if not mark:
            raise DataError(
                "The chat template leaves out what an assistant said, so a conversation cannot go on "
                "append-only."
            )
        return tail

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _begin(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def _special_prefix(self) -> list[int]:
        """The ids that the tokenizer puts before a plain text."""
        with self._lock:
            plain, full = self._encode("x"), list(self.tokenizer.encode("x"))
        start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return full[:start]


def _read_template(template: str | Path | None) -> str | None:
    if template is None or (isinstance(template, str) and ("{" in template or "\n" in template)):
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise DataError(f"There is no chat template file {path} (looked in {Path.cwd()}).")
    return path.read_text(encoding="utf-8")
