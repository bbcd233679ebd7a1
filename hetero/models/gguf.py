"""Read a Llama-type GGUF file as a Transformers checkpoint. Needs the `gguf` package (extra `hetero[gguf]`).

Only the container and the block formats come from that package; names, the rotary un-permutation, the config
and the tokenizer are ours (see `gguf_tokenizer` for why the tokenizer is not left to Transformers).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig

from hetero.errors import ModelError, UnavailableError
from hetero.models.gguf_tokenizer import build_tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def gguf_package() -> Any:
    """The optional `gguf` package. Raises UnavailableError when it is not installed."""
    try:
        import gguf  # noqa: PLC0415  (optional third-party package)
    except ImportError as error:
        raise UnavailableError(
            "reading GGUF files needs the `gguf` package, which is not installed: pip install 'hetero[gguf]'"
        ) from error
    return gguf


class GgufSource:
    """A GGUF file of architecture `llama` (Llama, Mistral, SmolLM), dequantised to fp32 tensor by tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelError(f"there is no GGUF file at {self.path}")
        self._package = gguf_package()
        try:
            self._reader = self._package.GGUFReader(self.path)
        except ValueError as error:
            raise ModelError(f"{self.path} is not a readable GGUF file: {error}") from error
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ModelError(
                f"{self.path} holds the architecture {architecture!r}; only 'llama' can be read. "
                "Pass the Transformers directory of the original instead."
            )
        self.origin = str(self._field("general.name", self.path.stem))
        self.license: str | None = self._field("general.license", None)
        self._tensors = {self._name(t.name): t for t in self._reader.tensors}
        self.config = self._config()

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ModelError(
            f"{self.path} lacks the metadata key {key!r}; it was not written by a known converter"
        )

    def _name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        prefix, _, rest = name.partition(".")
        index, _, rest = rest.partition(".")
        base, _, suffix = rest.rpartition(".")
        if prefix == "blk" and base in _LAYER_NAMES and suffix == "weight":
            return f"model.layers.{index}.{_LAYER_NAMES[base]}.weight"
        raise ModelError(
            f"{self.path} has a tensor {name!r} that a plain Llama has not (scaled rotary factors, biases, "
            "experts ...), so the result would be wrong. Pass the original Transformers directory instead."
        )

    def _config(self) -> LlamaConfig:
        get = self._field
        if get("llama.rope.scaling.type", "none") != "none":
            raise ModelError(f"{self.path} scales its rotary positions; such GGUF files cannot be read")
        num_heads = get("llama.attention.head_count")
        return LlamaConfig(
            vocab_size=len(get("tokenizer.ggml.tokens")),
            hidden_size=get("llama.embedding_length"),
            intermediate_size=get("llama.feed_forward_length"),
            num_hidden_layers=get("llama.block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=get("llama.attention.head_count_kv", num_heads),
            head_dim=get("llama.rope.dimension_count", get("llama.embedding_length") // num_heads),
            max_position_embeddings=get("llama.context_length"),
            rms_norm_eps=_short(get("llama.attention.layer_norm_rms_epsilon")),
            rope_parameters={"rope_type": "default", "rope_theta": get("llama.rope.freq_base", 10000.0)},
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            bos_token_id=get("tokenizer.ggml.bos_token_id", None),
            eos_token_id=get("tokenizer.ggml.eos_token_id", None),
            pad_token_id=get("tokenizer.ggml.padding_token_id", None),
            dtype=torch.bfloat16,
            architectures=["LlamaForCausalLM"],
        )

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, dequantised to fp32."""
        raw = self._tensors[name]
        values = torch.from_numpy(self._package.quants.dequantize(raw.data, raw.tensor_type).copy())
        if name.endswith("q_proj.weight"):
            return _unpermute(values, self.config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(values, self.config.num_key_value_heads or self.config.num_attention_heads)
        return values

    def save_tokenizer(self, directory: Path) -> None:
        build_tokenizer(self._field, self.config.max_position_embeddings).save_pretrained(directory)
        GenerationConfig(
            bos_token_id=self.config.bos_token_id,
            eos_token_id=self.config.eos_token_id,
            pad_token_id=self.config.pad_token_id,
        ).save_pretrained(directory)


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a head: from GGUF's interleaved rotary pairs (x0 y0 x1 y1 ..) to halves (x0 x1 .. y0 y1 ..)."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _short(value: float) -> float:
    """The shortest decimal of a number that went through fp32: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{value:.7g}")
