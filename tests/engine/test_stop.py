from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hetero.engine.stop import Detokenizer, StopChecker, TextStream

TEXTS = st.text(st.sampled_from("ab \n\N{SNOWMAN}é\N{GRINNING FACE}字"), max_size=20)


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """SentencePiece style: a space is part of the next word, and unknown bytes have tokens of their own."""
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581a", "\u2581b", "a", "b", "ab"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@given(TEXTS)
def test_pieces_join_to_the_whole_text(tiny_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    detokenizer = Detokenizer(tiny_tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.feed(i) for i in tiny_tokenizer.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_come_out_in_the_end(tiny_tokenizer: PreTrainedTokenizerFast, data: list[int]) -> None:
    """Bytes that are no UTF-8 must neither raise nor be held back for ever."""
    detokenizer = Detokenizer(tiny_tokenizer, skip_special_tokens=True)
    lag = 0
    for token in (3 + byte for byte in data):
        lag = 0 if detokenizer.feed(token) else lag + 1
        assert lag <= 8
    detokenizer.flush()
    tokens = tiny_tokenizer.encode("fine")
    assert "".join(map(detokenizer.feed, tokens)) == "fine"


def test_spaces_that_hang_on_words(words: PreTrainedTokenizerFast) -> None:
    ids = words.convert_tokens_to_ids(
        ["\u2581a", "\u2581b", "ab", "<0xE2>", "<0x98>", "<0x83>", "\u2581a", "</s>"]
    )
    detokenizer = Detokenizer(words, skip_special_tokens=True)
    assert [detokenizer.feed(i) for i in ids] == ["a", " b", "ab", "", "", "\N{SNOWMAN}", " a", ""]
    assert words.decode(ids, skip_special_tokens=True) == "a bab\N{SNOWMAN} a"


@given(
    text=TEXTS, strings=st.lists(st.text("ab \N{SNOWMAN}", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_a_stop_string_ends_at_the_token_that_completes_it(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, strings: list[str]
) -> None:
    tokens = tiny_tokenizer.encode(text)
    checker = StopChecker(frozenset(), strings, tiny_tokenizer)
    stopped = next(((n, hit) for n, token in enumerate(tokens, 1) if (hit := checker.check(token))), None)
    decoded = [
        tiny_tokenizer.decode(tokens[:n], clean_up_tokenization_spaces=False) for n in range(len(tokens) + 1)
    ]
    expected = next((n for n, seen in enumerate(decoded) if any(s in seen for s in strings)), None)
    assert (stopped and stopped[0]) == expected
    if stopped:
        assert stopped[1] in decoded[stopped[0]]
        assert stopped[1] in strings


def test_stop_ids_come_before_strings(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    a, b = tiny_tokenizer.encode("ab")
    checker = StopChecker(frozenset({b}), ("ab",), tiny_tokenizer)
    assert checker.check(a) is None
    assert checker.check(b) == b


def test_the_text_of_a_special_token_can_stop(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    checker = StopChecker(frozenset(), ("<|im_end|>",), tiny_tokenizer)
    assert checker.check(tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")) == "<|im_end|>"


@given(text=TEXTS, strings=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_reader_never_sees_a_part_of_a_stop_string(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, strings: list[str]
) -> None:
    tokens = tiny_tokenizer.encode(text)
    checker, stream = StopChecker(frozenset(), strings, tiny_tokenizer), TextStream(tiny_tokenizer, strings)
    shown = ""
    for n, token in enumerate(tokens, 1):
        hit = checker.check(token)
        shown += stream.feed(token, last=hit is not None or n == len(tokens))
        assert text.startswith(shown)
        if hit:
            break
    ends = [text.find(s) for s in strings if s in text]
    if not ends:
        assert shown == text
    else:
        assert not any(s in shown for s in strings)
        assert shown == text[: text.find(hit)] or len(shown) <= text.find(hit)


def test_text_that_cannot_become_a_stop_string_is_shown_at_once(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    stream = TextStream(tiny_tokenizer, ("abc",))
    assert [stream.feed(t) for t in tiny_tokenizer.encode("xabxab")] == ["x", "", "", "abx", "", ""]
    assert stream.feed(None, last=True) == "ab"
