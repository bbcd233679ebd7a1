from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero.data import ChatRenderer
from hetero.errors import DataError

BOS_CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking | default(true) %}<think></think>{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "hello?"}]


def test_a_prompt_is_what_the_template_writes(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = ChatRenderer(tokenizer).prompt([{"role": "system", "content": "Be brief."}, *USER])
    want = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids) == want
    assert ids == tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *USER], add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("template", [BOS_CHATML, BOS_CHATML.removeprefix("{{ bos_token }}")])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_is_never_doubled_and_never_missing(make_tokenizer, template, adds_bos):
    tokenizer = make_tokenizer(template, adds_bos=adds_bos)
    renderer = ChatRenderer(tokenizer)
    expected = 1 if adds_bos or "bos_token" in template else 0
    ids = renderer.prompt(USER)
    assert ids.count(tokenizer.bos_token_id) == expected
    assert ids[:expected] == [tokenizer.bos_token_id] * expected
    assert tokenizer.eos_token_id not in ids
    plain = renderer.plain("hello")
    assert plain.count(tokenizer.bos_token_id) == int(adds_bos)
    assert tokenizer.eos_token_id not in plain, "a prompt that is to be continued must not be ended"


def test_a_missing_template_is_an_error_only_for_messages(make_tokenizer):
    renderer = ChatRenderer(make_tokenizer(None))
    assert renderer.text(renderer.plain("hello")) == "hello"
    assert renderer.stop_ids == (1,)
    with pytest.raises(DataError, match="no chat template"):
        renderer.prompt(USER)


def test_a_template_can_be_given_as_text_or_file(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(None)
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    from_file = ChatRenderer(tokenizer, template=tmp_path / "chat.jinja").prompt(USER)
    from_text = ChatRenderer(tokenizer, template="{{ messages[0].content }}").prompt(USER)
    assert tokenizer.decode(from_file) == "[hello?]>"
    assert tokenizer.decode(from_text) == "hello?"
    with pytest.raises(DataError, match=r"no chat template file .*missing\.jinja"):
        ChatRenderer(tokenizer, template=tmp_path / "missing.jinja")


def test_template_variables_and_refusals(make_tokenizer):
    tokenizer = make_tokenizer(THINKING)
    assert tokenizer.decode(
        ChatRenderer(tokenizer, variables={"enable_thinking": False}).prompt(USER)
    ).endswith("<think></think>")
    assert "<think>" not in tokenizer.decode(ChatRenderer(tokenizer).prompt(USER))
    refusing = ChatRenderer(make_tokenizer("{{ raise_exception('only user and assistant roles') }}"))
    with pytest.raises(DataError, match=r"roles user: only user and assistant"):
        refusing.prompt(USER)


@pytest.mark.parametrize("template", [BOS_CHATML, THINKING])
def test_turns_are_appended_and_sampled_ids_survive(make_tokenizer, template):
    """Ids that the tokenizer itself would never produce (h, e, l, l, o apart) must stay as they were
    sampled."""
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    vocab = tokenizer.get_vocab()
    end = vocab["<|im_end|>"]
    ids = renderer.prompt(USER)
    apart = [vocab[c] for c in "hello"]
    assert tokenizer.encode("hello") != apart
    replies = [[*apart, end], [vocab["he"], vocab["llo"], end], [*apart]]
    for turn, reply in enumerate(replies):
        before = [*ids, *reply]
        added = renderer.turn(reply, [{"role": "user", "content": f"again {turn}"}])
        ids = [*before, *added]
        assert ids[: len(before)] == before
    text = tokenizer.decode(ids)
    assert text.count("hello<|im_end|>\n<|im_start|>user\nagain") == 3
    assert text.endswith("again 2<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(vocab["<s>"]) == int("bos" in template)


def test_a_conversation_rendered_at_once_equals_the_one_that_grew(make_tokenizer):
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer)
    reply = [*tokenizer.encode("fine"), tokenizer.get_vocab()["<|im_end|>"]]
    more = [{"role": "tool", "content": "42"}, {"role": "user", "content": "and?"}]
    grown = [*renderer.prompt(USER), *reply, *renderer.turn(reply, more)]
    assert grown == renderer.prompt([*USER, {"role": "assistant", "content": "fine"}, *more])


def test_stop_ids_are_eos_and_end_of_turn(make_tokenizer):
    tokenizer = make_tokenizer()
    assert ChatRenderer(tokenizer).stop_ids == (1, 3)
    plain_ending = ChatRenderer(make_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}"))
    assert plain_ending.stop_ids == (1,), "an ordinary token such as a line break ends nothing"


def test_text_leaves_out_special_tokens_and_works_from_many_threads(make_tokenizer):
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer)
    ids = [*tokenizer.encode("hello , it 's"), 3]
    with ThreadPoolExecutor(8) as pool:
        texts = set(
            pool.map(
                lambda _: renderer.text(renderer.plain("hello , it 's")) + renderer.text(ids), range(200)
            )
        )
    assert texts == {"hello , it 's" * 2}


def test_tools_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer("{{ tools | tojson }}{{ messages[0].content }}")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert json.loads(
        tokenizer.decode(ChatRenderer(tokenizer).prompt(USER, [tool])).removesuffix("hello?")
    ) == [tool]
