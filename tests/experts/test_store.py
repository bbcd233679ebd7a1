"""ExpertStore: packing keeps values, forward agrees with the formula, wrong shapes are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hetero.errors import ModelError, ShapeError
from hetero.experts import ExpertLayout, ExpertStore, StoreBuilder


def tensors(e: int, h: int, i: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(e, 2 * i, h, generator=generator).mul(h**-0.5).bfloat16()
    down = torch.randn(e, h, i, generator=generator).mul(i**-0.5).bfloat16()
    return gate_up, down


@pytest.mark.parametrize(("e", "h", "i"), [(1, 32, 32), (3, 40, 24), (5, 33, 17), (2, 64, 96)])
def test_dequantize_returns_what_was_packed(e: int, h: int, i: int) -> None:
    gate_up, down = tensors(e, h, i)
    store = ExpertStore.from_tensors(gate_up, down)
    assert (store.num_experts, store.hidden_size, store.intermediate_size) == (e, h, i)
    got = store.dequantize()
    assert torch.equal(got[0], gate_up)
    assert torch.equal(got[1], down)
    assert store.nbytes >= gate_up.nbytes + down.nbytes


def test_forward_is_the_weighted_sum_of_the_chosen_experts() -> None:
    gate_up, down = tensors(4, 48, 40)
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 1], [3, 2], [1, 1], [2, 0], [0, 3], [3, 1], [2, 3]])
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    want = torch.zeros(7, 48, dtype=torch.float64)
    for t in range(7):
        for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (x[t].double() @ gate_up[e].double().T).chunk(2)
            want[t] += w * ((functional.silu(gate) * up) @ down[e].double().T)
    got = ExpertStore.from_tensors(gate_up, down).forward(x, ids, weights)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    gate_up, down = tensors(2, 32, 32)
    with pytest.raises(ShapeError, match="expected"):
        ExpertStore.from_tensors(gate_up[0], down[0])
    with pytest.raises(ShapeError, match=r"\[E, 2I, H\]"):
        ExpertStore.from_tensors(gate_up, down[:1])
    with pytest.raises(ShapeError, match="gate_up_bias"):
        ExpertStore.from_tensors(gate_up, down, gate_up_bias=torch.zeros(2, 3))
    with pytest.raises(ShapeError, match="not a weight format"):
        ExpertStore.from_tensors(gate_up, down, format="float7")
    with pytest.raises(ShapeError, match="no scales"):
        ExpertStore.from_tensors(gate_up, down, group_size=32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_builder_brings_every_layout_to_one_form_and_back(transposed: bool, interleaved: bool) -> None:
    gate_up, down = tensors(3, 40, 24)
    bias = torch.arange(3 * 48, dtype=torch.float32).view(3, 48)
    layout = ExpertLayout(3, 40, 24, transposed=transposed, interleaved=interleaved, has_bias=True)
    builder = StoreBuilder(layout)
    alternating = gate_up.unflatten(1, (2, 24)).transpose(1, 2).flatten(1, 2)
    stored = {
        "gate_up_proj": alternating if interleaved else gate_up,
        "down_proj": down,
        "gate_up_proj_bias": bias.unflatten(1, (2, 24)).transpose(1, 2).flatten(1) if interleaved else bias,
        "down_proj_bias": torch.ones(3, 40),
    }
    if transposed:
        stored |= {name: stored[name].mT for name in ("gate_up_proj", "down_proj")}
    for name, tensor in stored.items():
        builder.add(name, tensor)
    store = builder.finish()
    got = store.dequantize()
    assert torch.equal(got[0], gate_up)
    assert torch.equal(got[1], down)
    assert store.gate_up_bias is not None
    assert torch.equal(store.gate_up_bias, bias)
    for name, tensor in layout.unpack(store).items():
        assert torch.equal(tensor, stored[name]), name


def test_builder_takes_single_experts_in_any_order_and_names_what_is_missing() -> None:
    gate_up, down = tensors(4, 32, 32)
    builder = StoreBuilder(ExpertLayout(4, 32, 32, has_bias=True))
    for e in (3, 0, 2):
        builder.add_expert("gate_up_proj", e, gate_up[e])
    builder.add("down_proj", down)
    with pytest.raises(ModelError, match=r"gate_up_proj \(experts 1\), gate_up_proj_bias, down_proj_bias"):
        builder.finish()
    with pytest.raises(ShapeError, match="expert 1"):
        builder.add_expert("gate_up_proj", 1, gate_up[1, :5])
    with pytest.raises(ShapeError, match="expert 1"):
        builder.add_expert("gate_up_proj", 1, gate_up[1, :32], gate_up[1, :5])
    builder.add_expert("gate_up_proj", 1, *gate_up[1].chunk(2))
    builder.add("gate_up_proj_bias", torch.zeros(4, 64))
    builder.add("down_proj_bias", torch.zeros(4, 32))
    assert torch.equal(builder.finish().dequantize()[0], gate_up)
    with pytest.raises(ModelError, match="not one hetero knows"):
        builder.add("up_proj", gate_up)
