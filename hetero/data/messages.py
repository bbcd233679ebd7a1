"""What a prompt is: plain text, or the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from hetero.errors import DataError

Message: TypeAlias = dict[str, Any]
"""`{"role": str, "content": str}`; a tool call may come without content, other keys pass to the chat template
as they are."""

Prompt: TypeAlias = "str | list[Message]"
"""What a data set may call a prompt: text, or a conversation that the model is to go on with."""


def check_messages(messages: object, where: str) -> list[Message]:
    """`messages` if it is a conversation that a model can answer; `where` names it in errors.

    Raises DataError: not a list, empty, a message without role or with a content that is not text, or the
    last word is already the assistant's.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: the messages must be a non-empty list of {{role, content}}, got {_short(messages)}."
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: message {number} must be a mapping with a role, got {_short(message)}."
            )
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"{where}: the content of message {number} ({message['role']}) must be text, got "
                f"{_short(content)}."
            )
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's, so there is nothing left to answer. Put the "
            "reference answer "
            "in a column of its own (such as `answer`) and end the messages with the user's turn."
        )
    return messages


def text_of(prompt: Prompt) -> str:
    """A prompt as one text: itself, or the last message of the conversation. For tables and terminals
    only."""
    if isinstance(prompt, str):
        return prompt
    return next((m["content"] for m in reversed(prompt) if isinstance(m.get("content"), str)), "")


def conversation(text: str, system: str | None) -> list[Message]:
    """One user turn, after a system message if there is one."""
    first: Iterable[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
