"""Rebuild a tokenizer from the metadata of a GGUF file: byte-level BPE, or SentencePiece as Mixtral has
it.

Transformers' own GGUF conversion keeps the merges but not the pre-tokenizer: a SmolLM file loses the rule
that every digit stands alone, so numbers tokenize otherwise than in training. Here the pre-tokenizer named by
the file decides, and one that is not in the table is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from hetero.errors import ModelError

# Token types of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4
_BLANK = "▁"

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
    "olmo": _gpt2,
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
        ModelError: the vocabulary is of another kind, or its pre-tokenizer is not known here.
    """
    tokens: list[str] = field("tokenizer.ggml.tokens")
    types: list[int] = field("tokenizer.ggml.token_type")
    kind, cut = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "default")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if kind == "llama":
        backend = _sentencepiece(field, vocabulary)
    elif kind == "gpt2" and cut in PRE_TOKENIZERS:
        backend = _byte_level(field, vocabulary, cut)
    else:
        raise ModelError(
            f"the GGUF file has a {kind!r} vocabulary with the pre-tokenizer {cut!r}; known are 'llama' "
            f"(SentencePiece) and 'gpt2' (byte-level BPE) with one of {sorted(PRE_TOKENIZERS)}. Pass the "
            "Transformers directory instead."
        )
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in own])
    names = {
        name: tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := field(f"tokenizer.ggml.{key}_token_id", None)) is not None
    }
    add_bos = field("tokenizer.ggml.add_bos_token", kind == "llama" or cut == "llama-bpe")
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
    byte_level = processors.ByteLevel(trim_offsets=False)  # of SentencePiece it changes nothing
    if not add_bos or bos is None:
        return byte_level
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
    return processors.Sequence([byte_level, template])


def _byte_level(field: Callable[..., Any], vocabulary: dict[str, int], cut: str) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    backend.pre_tokenizer = PRE_TOKENIZERS[cut]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(field: Callable[..., Any], vocabulary: dict[str, int]) -> Tokenizer:
    """BPE over whole text, blanks written as "▁", what is in no piece as bytes "<0x0A>"."""
    unknown = field("tokenizer.ggml.tokens")[field("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges(vocabulary, field("tokenizer.ggml.scores"))
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix = field("tokenizer.ggml.add_space_prefix", True)
    spell = [normalizers.Replace(" ", _BLANK)]
    backend.normalizer = normalizers.Sequence([*([normalizers.Prepend(_BLANK)] if prefix else []), *spell])
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the piece of the best score first: the order in which
    SentencePiece joins."""
    found = []
    for piece, index in vocabulary.items():
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        own = [(vocabulary[a], vocabulary[b], a, b) for a, b in cuts if a in vocabulary and b in vocabulary]
        found += [(-scores[index], index, a, b) for _, _, a, b in sorted(own)]
    return [(a, b) for _, _, a, b in sorted(found, key=lambda merge: merge[:2])]
