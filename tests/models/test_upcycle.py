"""Sparse upcycling keeps the function of the dense model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hetero.errors import ModelError
from hetero.models import shards
from hetero.models.upcycle import upcycle

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
DENSE = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    ),
}


def _dense(kind: str, directory: Path, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = DENSE[kind]()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # Transformers starts them at zero, where losing one would not show
                torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "architecture", "experts", "top_k"),
    [
        ("llama", "mixtral", 4, 2),
        ("llama", "mixtral", 3, 1),
        ("llama", "qwen2_moe", 4, 3),
        ("mistral", "mixtral", 4, 2),
        ("qwen2", "qwen2_moe", 4, 2),
    ],
)
def test_the_mixture_computes_the_dense_function(
    kind: str,
    architecture: str,
    experts: int,
    top_k: int,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    dense = _dense(kind, tmp_path / "dense", tiny_tokenizer)
    out = upcycle(
        tmp_path / "dense",
        tmp_path / "moe",
        experts=experts,
        top_k=top_k,
        architecture=architecture,
        dtype=torch.float32,
    )
    mixture = AutoModelForCausalLM.from_pretrained(out)
    assert mixture.config.model_type == architecture
    assert mixture.config.num_experts == experts
    assert mixture.config.num_experts_per_tok == top_k
    ids = torch.randint(3, 259, (5, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(mixture.generate(ids, **options), dense.generate(ids, **options))


def test_shards_tokenizer_and_card_are_complete(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    _dense("llama", tmp_path / "dense", tiny_tokenizer)
    whole = upcycle(tmp_path / "dense", tmp_path / "whole")
    monkeypatch.setattr(shards.ShardWriter.__init__, "__defaults__", (100_000,))
    out = upcycle(tmp_path / "dense", tmp_path / "moe")
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 300_000 for file in files)
    pieces = {name: tensor for file in files for name, tensor in load_file(file).items()}
    single = load_file(whole / "model.safetensors")
    assert pieces.keys() == single.keys()
    assert all(torch.equal(pieces[name], single[name]) for name in single)
    assert all(tensor.dtype == torch.bfloat16 for tensor in single.values())
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_text() == (tmp_path / "dense" / name).read_text()
    assert "8 experts of which 2" in (out / "README.md").read_text()
    assert not list(tmp_path.glob(".*")), "temporary directories were left behind"


def test_noise_and_router_follow_the_seed(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    _dense("llama", tmp_path / "dense", tiny_tokenizer)
    runs = [
        load_file(
            upcycle(tmp_path / "dense", tmp_path / str(i), expert_noise=0.05, seed=seed) / "model.safetensors"
        )
        for i, seed in enumerate((7, 7, 8))
    ]
    gate, expert = (f"model.layers.1.block_sparse_moe.{end}.weight" for end in ("gate", "experts.{}.w1"))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0][gate], runs[2][gate])
    assert not torch.equal(runs[0][expert.format(0)], runs[0][expert.format(1)])
    original = load_file(tmp_path / "dense" / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"]
    change = runs[0][expert.format(0)].float() - original
    assert 0.04 < change.std() / original.std() < 0.06


def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    _dense("llama", tmp_path / "dense", tiny_tokenizer)

    def torn(self: shards.ShardWriter) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(shards.ShardWriter, "finish", torn)
    with pytest.raises(OSError, match="disk full"):
        upcycle(tmp_path / "dense", tmp_path / "moe")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "qwen3_moe"}, "unknown architecture"),
        ({"experts": 2, "top_k": 3}, "top_k=3"),
        ({"top_k": 0}, "top_k=0"),
        ({"expert_noise": -1.0}, "negative"),
    ],
)
def test_wrong_numbers_are_refused(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        upcycle(tmp_path, tmp_path / "moe", **arguments)


def test_wrong_sources_are_refused(
    tmp_path: Path, tiny_moe_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ModelError, match="'mixtral' model"):
        upcycle(tiny_moe_dir, tmp_path / "moe")
    with pytest.raises(ModelError, match=r"no config\.json"):
        upcycle(tmp_path / "nothing", tmp_path / "moe")
    _dense("qwen2", tmp_path / "qwen2", tiny_tokenizer)
    with pytest.raises(ModelError, match="can be made from llama, mistral"):
        upcycle(tmp_path / "qwen2", tmp_path / "moe", architecture="mixtral")
    _dense("mistral", tmp_path / "mistral", tiny_tokenizer)
    with pytest.raises(ModelError, match="sliding window"):
        upcycle(tmp_path / "mistral", tmp_path / "moe", architecture="qwen2_moe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ModelError, match="not empty"):
        upcycle(tmp_path / "mistral", tmp_path / "full")
    assert (tmp_path / "full" / "precious").exists()
