"""Rebuild a byte-level BPE tokenizer from the metadata of a GGUF file.

Transformers' own GGUF conversion keeps the merges but not the pre-tokenizer: a SmolLM file loses the rule
that every digit stands alone, so numbers tokenize otherwise than in training. Here the pre-tokenizer named by
the file decides, and one that is not in the table is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from hetero.errors import ModelError

# Token types of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The value of `tokenizer.ggml.pre` -> how text is cut before the merges.
PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def build_tokenizer(field: Callable[..., Any], max_length: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer that cuts text as the GGUF file prescribes.

    Args:
        field: `field(key)` returns a metadata value; `field(key, default)` when it may be absent.
        max_length: context length of the model, in tokens.

    Raises:
        ModelError: the vocabulary is not byte-level BPE or its pre-tokenizer is not known here.
    """
    kind, cut = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or cut not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file has a {kind!r} vocabulary with the pre-tokenizer {cut!r}; known are 'gpt2' "
            f"(byte-level BPE) with one of {sorted(PRE_TOKENIZERS)}. Pass the Transformers directory instead."
        )
    tokens: list[str] = field("tokenizer.ggml.tokens")
    types: list[int] = field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    backend.pre_tokenizer = PRE_TOKENIZERS[cut]()
    backend.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in own])
    names = {
        name: tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := field(f"tokenizer.ggml.{key}_token_id", None)) is not None
    }
    add_bos = field("tokenizer.ggml.add_bos_token", cut == "llama-bpe")
    backend.post_processor = _post_processor(names.get("bos"), vocabulary, add_bos)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in names.items()},
    )
    tokenizer.chat_template = field("tokenizer.chat_template", None)
    return tokenizer


def _post_processor(bos: str | None, vocabulary: dict[str, int], add_bos: bool) -> Any:
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not add_bos or bos is None:
        return byte_level
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
    return processors.Sequence([byte_level, template])
