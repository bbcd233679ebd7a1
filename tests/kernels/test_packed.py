"""Packing: the layout, the way back, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hetero.errors import ShapeError
from hetero.kernels import cpu

SHAPES = [(1, 1), (1, 33), (33, 1), (31, 31), (32, 32), (64, 96), (131, 200), (2880, 7), (50, 1407)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_is_the_inverse(n: int, k: int) -> None:
    weight = torch.randn(n, k).bfloat16()
    packed = cpu.pack(weight)
    assert (packed.e, packed.n, packed.k) == (1, n, k)
    assert torch.equal(packed.unpack(), weight)
    assert packed.nbytes == 2 * cpu.padded(n) * cpu.padded(k)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_stack_is_its_matrices_back_to_back(n: int, k: int) -> None:
    weight = torch.randn(3, n, k)
    packed = cpu.pack(weight)
    assert torch.equal(packed.unpack(), weight.bfloat16())
    assert torch.equal(packed.data, torch.cat([cpu.pack(one).data for one in weight]))


def test_the_layout_is_panels_of_pairs() -> None:
    n, k = 70, 37
    weight = torch.randn(n, k).bfloat16()
    want = torch.zeros(96, 64, dtype=torch.bfloat16)
    want[:n, :k] = weight
    panels = want.view(3, 32, 32, 2).permute(0, 2, 1, 3)  # [N/32, K/2, 32, 2]
    assert torch.equal(cpu.pack(weight).data.view(3, 32, 32, 2), panels)


def test_fp32_is_rounded_to_nearest_even() -> None:
    bits = torch.randint(-(2**31), 2**31, (64, 64), dtype=torch.int64).to(torch.int32)
    weight = bits.view(torch.float32)
    weight = torch.where(weight.isfinite(), weight, 1.0)
    assert torch.equal(cpu.pack(weight).unpack(), weight.bfloat16())


def test_parts_are_padded_each_on_its_own() -> None:
    weight = torch.randn(2, 2 * 20, 40).bfloat16()
    packed = cpu.pack(weight, parts=2)
    assert torch.equal(packed.unpack(), weight)
    assert packed.n_pad == 64
    first_up = packed.data.view(2, 2, 32, 32, 2)[0, 1, :, 0].flatten()[:40]  # panel 1, row 0, all of K
    assert torch.equal(first_up, weight[0, 20])


def test_filling_one_by_one() -> None:
    weight = torch.randn(3, 50, 70)
    packed = cpu.PackedWeight.empty(3, 50, 70)
    for index in (2, 0, 1):
        packed.set(index, weight[index])
    assert torch.equal(packed.data, cpu.pack(weight).data)
    with pytest.raises(ShapeError, match=r"expected \[50, 70\]"):
        packed.set(0, weight[0, :49])
    with pytest.raises(ShapeError, match="3 matrices"):
        packed.set(3, weight[0])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4), r"weight is \[4\]"),
        (torch.zeros(2, 2, 2, 2), "expected"),
        (torch.zeros(4, 4, dtype=torch.float64), "float64"),
        (torch.zeros(0, 4), "positive sizes"),
        (torch.zeros(4, 4, device="meta"), "on meta"),
    ],
)
def test_what_cannot_be_packed(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        cpu.pack(weight)
