"""The layers of well-known models by name, and of any other by numbers."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hetero.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Gated experts: E of them, `top_k` per token, [hidden -> intermediate -> hidden]."""

    E: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False

    def check(self) -> None:
        if self.top_k > self.E:
            raise ArgumentError(f"the shape has top_k={self.top_k} of E={self.E} experts; top_k is at most E")

    @property
    def weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class LinearShape:
    """y [T, N] = x [T, K] W^T."""

    N: int
    K: int

    def check(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Causal attention of `heads` query heads over `kv_heads` heads of keys [dim] and values [v_dim]."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int = 0
    window: int = 0

    def check(self) -> None:
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"the shape has heads={self.heads} and kv_heads={self.kv_heads}; expected a multiple"
            )

    @property
    def values(self) -> int:
        return self.v_dim or self.dim


@dataclass(frozen=True, slots=True)
class RowShape:
    """What row operations run over: hidden states, the router's E probabilities, logits."""

    E: int
    top_k: int
    hidden: int
    vocab: int

    def check(self) -> None:
        if self.top_k > self.E:
            raise ArgumentError(f"the shape has top_k={self.top_k} of E={self.E} experts; top_k is at most E")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model: the experts and the attention of a layer, its linears by name (with the head), its layers."""

    moe: MoeShape
    attention: AttentionShape
    linears: dict[str, LinearShape]
    layers: int


def _model(moe: MoeShape, attention: AttentionShape, vocab: int, layers: int) -> ModelShape:
    """A model with plain grouped-query attention."""
    hidden, dim = moe.hidden, attention.dim
    linears = {
        "q_proj": LinearShape(attention.heads * dim, hidden),
        "k_proj": LinearShape(attention.kv_heads * dim, hidden),
        "o_proj": LinearShape(hidden, attention.heads * dim),
        "lm_head": LinearShape(vocab, hidden),
    }
    return ModelShape(moe, attention, linears, layers)


MODELS: dict[str, ModelShape] = {
    "qwen3-30b-a3b": _model(MoeShape(128, 8, 2048, 768), AttentionShape(32, 4, 128), 151936, 48),
    "gpt-oss-20b": _model(
        MoeShape(32, 4, 2880, 2880, "swiglu_oss", limit=7.0, bias=True), AttentionShape(64, 8, 64), 201088, 24
    ),
    "deepseek-v3": ModelShape(
        MoeShape(256, 8, 7168, 2048),
        AttentionShape(128, 128, 192, 128),
        {
            "q_a_proj": LinearShape(1536, 7168),
            "q_b_proj": LinearShape(24576, 1536),
            "kv_b_proj": LinearShape(32768, 512),
            "o_proj": LinearShape(7168, 16384),
            "lm_head": LinearShape(129280, 7168),
        },
        61,
    ),
    "glm-4.5-air": _model(MoeShape(128, 8, 4096, 1408), AttentionShape(96, 8, 128), 151552, 46),
    "mixtral-8x7b": _model(MoeShape(8, 2, 4096, 14336), AttentionShape(32, 8, 128), 32000, 32),
    "olmoe-1b-7b": _model(MoeShape(64, 8, 2048, 1024), AttentionShape(16, 16, 128), 50304, 16),
    "quickstart": _model(MoeShape(8, 2, 576, 1536), AttentionShape(9, 3, 64), 49152, 30),
}

Shape = TypeVar("Shape", MoeShape, LinearShape, AttentionShape, RowShape)


def moe_shape(text: str) -> MoeShape:
    """`text` is a model's name or "E=128,top_k=8,hidden=2048,intermediate=768"."""
    return _numbers(text, MoeShape) if "=" in text else model_shape(text).moe


def attention_shape(text: str) -> AttentionShape:
    """`text` is a model's name or "heads=32,kv_heads=4,dim=128[,v_dim=..][,window=..]"."""
    return _numbers(text, AttentionShape) if "=" in text else model_shape(text).attention


def row_shape(text: str) -> RowShape:
    """`text` is a model's name or "E=128,top_k=8,hidden=2048,vocab=151936"."""
    if "=" in text:
        return _numbers(text, RowShape)
    model = model_shape(text)
    return RowShape(model.moe.E, model.moe.top_k, model.moe.hidden, model.linears["lm_head"].N)


def linear_shapes(text: str) -> dict[str, LinearShape]:
    """Shapes by label: those of a model ("NAME"), one of them ("NAME/o_proj"), or "N=4096,K=2048"."""
    if "=" in text:
        return {text: _numbers(text, LinearShape)}
    name, _, layer = text.partition("/")
    linears = model_shape(name).linears
    if layer and layer not in linears:
        raise ArgumentError(f"{name} has no linear {layer!r}; it has {', '.join(linears)}")
    return {f"{name}/{key}": shape for key, shape in linears.items() if layer in ("", key)}


def model_shape(name: str) -> ModelShape:
    """A known model. Raises ArgumentError with the nearest name."""
    found = MODELS.get(name)
    if found is None:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(
            f"{name!r} is not a known shape{hint} Known are {', '.join(MODELS)}; or give numbers, such as "
            "E=128,top_k=8,hidden=2048,intermediate=768"
        )
    return found


def _numbers(text: str, kind: type[Shape]) -> Shape:
    known = {f.name: f for f in fields(kind) if f.type == "int"}
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in known:
            raise ArgumentError(f"{key!r} in the shape {text!r} is unknown; a shape has {', '.join(known)}")
        if not value.isdigit() or int(value) < (key not in ("v_dim", "window")):
            raise ArgumentError(f"{key} in the shape {text!r} is {value!r}; expected a positive whole number")
        given[key] = int(value)
    missing = [k for k in known if k not in given and k not in ("v_dim", "window")]
    if missing:
        raise ArgumentError(f"the shape {text!r} lacks {', '.join(missing)}")
    shape = kind(**given)
    shape.check()
    return shape
