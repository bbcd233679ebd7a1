"""Rotary angles by table: the original's, the same whenever asked for, refused where they would change."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from hetero.errors import CapacityError, ModelError
from hetero.models import rotary
from hetero.models.rotary import RotaryTable, rotary_limit


def llama(**rope: object) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=parameters
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_originals(dtype: torch.dtype) -> None:
    original = llama()
    table = RotaryTable(original)
    x = torch.zeros(1, 1, 64, dtype=dtype)
    positions = torch.tensor([[0, 5, 900, 3], [17, 4095, 4096, 9000]])
    for got, want in zip(table(x, positions), original(x, positions), strict=True):
        assert got.dtype == dtype
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_a_position_keeps_its_bits_however_the_table_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 64)
    at_once = RotaryTable(llama())
    whole = at_once(x, torch.arange(3 * rotary.STEP)[None])
    grown = RotaryTable(llama())
    for position in (3, rotary.STEP + 7, 2 * rotary.STEP + 1, 9):
        got = grown(x, torch.tensor([[position]]))
        assert all(torch.equal(g[0, 0], w[0, position]) for g, w in zip(got, whole, strict=True))


def test_the_originals_other_attributes_are_still_there() -> None:
    original = llama()
    table = RotaryTable(original)
    assert table.config is original.config
    assert table.inv_freq is original.inv_freq
    with pytest.raises(AttributeError):
        _ = table.nothing


def test_limits() -> None:
    assert rotary_limit(llama()) is None
    assert rotary_limit(llama(rope_type="linear", factor=2.0)) is None
    assert rotary_limit(llama(rope_type="dynamic", factor=2.0)) == 64
    long = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 32,
        },
    )
    module = Phi3RotaryEmbedding(long)
    assert rotary_limit(module) == 32
    table, x = RotaryTable(module, 32), torch.zeros(1, 1, 64)
    want = Phi3RotaryEmbedding(long)(x, torch.tensor([[0, 31]]))
    for got, expected in zip(table(x, torch.tensor([[0, 31]])), want, strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(CapacityError, match="position 32 is past 32"):
        table(x, torch.tensor([[32]]))


def test_other_position_shapes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"by position \[B, S\]"):
        RotaryTable(llama())(torch.zeros(1, 1, 64), torch.zeros(3, 1, 4, dtype=torch.int64))
