"""Chat templates and data sets: from a file or a generator to prompts of token ids."""

from __future__ import annotations

from hetero.data.chat import ChatRenderer
from hetero.data.columns import Columns
from hetero.data.dataset import GENERATORS, Dataset, load_dataset
from hetero.data.files import Row, read_rows
from hetero.data.messages import Message, Prompt, conversation, text_of
from hetero.data.order import Draw, EpochOrder

__all__ = [
    "GENERATORS",
    "ChatRenderer",
    "Columns",
    "Dataset",
    "Draw",
    "EpochOrder",
    "Message",
    "Prompt",
    "Row",
    "conversation",
    "load_dataset",
    "read_rows",
    "text_of",
]
