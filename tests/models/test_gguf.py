"""GGUF files: weights, config and tokenizer survive, whatever cannot be read is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import permuted
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
)
from transformers.tokenization_utils_base import generate_merges

from hetero.errors import ModelError
from hetero.models.dense import save_dense
from hetero.models.gguf import GgufSource
from hetero.models.gguf_tokenizer import PRE_TOKENIZERS

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LETTERS = [
    chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
]
MERGES = ["1 2", "12 3", "t h", "Ġ Ġ", "Ċ Ċ", "Ġ th", "Ġ 1"]
TOKENS = ["<|end|>", "<|im_start|>", "<own>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


def _write(
    path: Path,
    model: LlamaForCausalLM,
    *,
    pre: str = "smollm",
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("mit")
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 4] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = permuted(
                values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        parts = name.removesuffix(".weight").split(".")
        if "layers" in parts:
            new_name = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.weight"
        else:
            new_name = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(
                parts[-1], "output"
            ) + ".weight"
        writer.add_tensor(new_name, values)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_and_config_survive(tmp_path: Path) -> None:
    model = _model()
    out = save_dense(_write(tmp_path / "tiny.gguf", model), tmp_path / "out", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert loaded.config.max_position_embeddings == 128
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert loaded.generation_config.eos_token_id == 0
    assert not loaded.config.tie_word_embeddings
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    ids = torch.randint(0, len(TOKENS), (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "123 12", ["1", "2", "3", "Ġ", "1", "2"]),
        ("smollm", "\n\n12", ["ĊĊ", "1", "2"]),
        ("smollm", "th  12", ["th", "ĠĠ", "1", "2"]),
        ("smollm", "12<own>th<|end|>", ["1", "2", "<own>", "th", "<|end|>"]),
        ("gpt-2", "123 12", ["123", "Ġ", "12"]),
        ("llama-bpe", "1231 th", ["123", "1", "Ġth"]),
        ("qwen2", "12 th", ["1", "2", "Ġth"]),
    ],
)
def test_the_pre_tokenizer_of_the_file_decides(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    out = save_dense(_write(tmp_path / "tiny.gguf", _model(), pre=pre), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


PIECES = ["▁", "t", "h", "e", "n", "th", "▁t", "▁th", "he", "the", "▁the", "en", "then", "▁then"]


def test_sentencepiece_vocabularies_cut_as_llama_s(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]

    def spm(writer: gguf.GGUFWriter) -> None:
        for key in ("model", "pre", "tokens", "token_type", "merges"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECES))

    file = _write(tmp_path / "a.gguf", _model(), edit=spm)
    tokenizer = GgufSource(file).tokenizer()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    llama = LlamaTokenizer(vocab=vocabulary, merges=merges)
    for text in ("then the hen", "then\n", "thé", ""):
        assert tokenizer(text).input_ids == [1, *llama(text, add_special_tokens=False).input_ids], text
    ids = tokenizer("then thé\n", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["▁then", "▁th"]
    assert tokenizer.decode(ids) == "then thé\n"
    # A blank is put before the text even where it begins with one, as SentencePiece does.
    assert tokenizer.convert_ids_to_tokens(tokenizer(" then").input_ids) == ["<s>", "▁", "▁then"]


def test_special_tokens_and_template(tmp_path: Path) -> None:
    out = save_dense(_write(tmp_path / "a.gguf", _model()), tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 1, 0)
    assert tokenizer.model_max_length == 128
    assert tokenizer("th").input_ids == [TOKENS.index("th")]
    assert tokenizer.decode([1, TOKENS.index("th"), 0], skip_special_tokens=True) == "th"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    with_bos = _write(tmp_path / "b.gguf", _model(), edit=lambda writer: writer.add_add_bos_token(True))
    tokenizer = AutoTokenizer.from_pretrained(save_dense(with_bos, tmp_path / "b"))
    assert tokenizer("th").input_ids == [1, TOKENS.index("th")]
    assert tokenizer("th", add_special_tokens=False).input_ids == [TOKENS.index("th")]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    factors = _write(
        tmp_path / "a.gguf",
        _model(),
        edit=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32)),
    )
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        GgufSource(factors)
    assert "made-up" not in PRE_TOKENIZERS
    with pytest.raises(ModelError, match="made-up"):
        save_dense(_write(tmp_path / "b.gguf", _model(), pre="made-up"), tmp_path / "b")
    assert not (tmp_path / "b").exists()
    (tmp_path / "c.gguf").write_bytes(b"not a GGUF file, but long enough to be read as a header")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        GgufSource(tmp_path / "c.gguf")
    with pytest.raises(ModelError, match="no GGUF file"):
        GgufSource(tmp_path / "d.gguf")
    writer = gguf.GGUFWriter(tmp_path / "e.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'qwen2'"):
        GgufSource(tmp_path / "e.gguf")
