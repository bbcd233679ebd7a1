from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(template: str | None = CHATML, *, adds_bos: bool = False) -> Any:
    """Byte-level, one id per byte except the merges he, llo; special tokens <s> </s> <|im_start|>
    <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *alphabet, "he", "ll", "llo"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o")]
    core = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[2:],
        chat_template=template,
    )


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    return build_tokenizer
