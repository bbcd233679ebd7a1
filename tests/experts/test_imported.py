"""Checkpoints in codes: repacked weights are those of an independent decoder, rounded once to bf16."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from coded_panels import Panels
from gguf_files import random_blocks
from torch import Tensor

from hetero.errors import ShapeError
from hetero.experts import ExpertStore, import_fp8, import_gguf, import_mxfp4
from hetero.experts.imported import gguf_codes
from hetero.experts.kquants import KQUANT_BLOCKS
from hetero.formats import packing
from hetero.kernels import cpu
from hetero.kernels.cpu import CodedWeight, Context, PackedLora, linear, linear_backward, pack

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5])  # the last has scales among the denormal halves
def test_gguf_blocks_keep_their_values(kind: str, scale: float) -> None:
    weight = torch.randn(70, 288, generator=generator()).mul(scale).numpy()
    kinds = gguf.GGMLQuantizationType
    raw = gguf.quants.quantize(weight, kinds[kind.upper()])
    want = torch.from_numpy(gguf.quants.dequantize(raw, kinds[kind.upper()]).astype(np.float32)).bfloat16()
    packed = import_gguf(torch.from_numpy(raw), kind)
    for isa in cpu.isas(emulated=True):
        with cpu.using(Context(2, isa)):
            assert torch.equal(packed.unpack(), want), isa


@pytest.mark.parametrize("kind", list(KQUANT_BLOCKS))
def test_k_quants_keep_their_values(kind: str) -> None:
    raw = random_blocks(kind, 2, 70, 3)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    coded = gguf_codes(torch.from_numpy(raw), kind)
    assert torch.equal(decoded(coded), torch.from_numpy(values.astype(np.float32)))
    want = torch.from_numpy(values.astype(np.float32)).bfloat16()
    assert bool(want.any())
    packed = coded.pack()
    for isa in cpu.isas(emulated=True):
        with cpu.using(Context(2, isa)):
            assert torch.equal(packed.unpack(), want), isa


def decoded(coded: CodedWeight) -> Tensor:
    """The fp32 weights of K-quants, from codes and bits of scales, as docs/formats.md defines them."""

    def factors(bits: Tensor) -> Tensor:
        half = (bits >> 16).to(torch.int16).view(torch.float16).float()
        return half * (bits & 255).to(torch.uint8).view(torch.int8).float()

    group = coded.packing.group_size
    codes = coded.codes.float().unflatten(-1, (-1, group))
    if coded.minima is None:
        return ((codes - 32) * factors(coded.scales)[..., None]).flatten(-2)
    return (codes * factors(coded.scales)[..., None] - factors(coded.minima)[..., None]).flatten(-2)


@pytest.mark.parametrize("kind", list(KQUANT_BLOCKS))
def test_products_with_k_quants_are_those_of_their_values(kind: str) -> None:
    packed = gguf_codes(torch.from_numpy(random_blocks(kind, 96, 2)), kind).pack()
    plain = pack(packed.unpack())
    a, b = torch.randn(4, 512, generator=generator(5)), torch.randn(96, 4, generator=generator(6))
    lora = PackedLora(pack(a), pack(b), 0.5)
    for isa in cpu.isas(emulated=True):
        with cpu.using(Context(2, isa)):
            for rows in (1, 2, 9, 40):
                x = torch.randn(rows, 512, generator=generator(2)).bfloat16()
                dout = torch.randn(rows, 96, generator=generator(3)).bfloat16()
                y, xa = linear(x, packed, lora=lora)
                want, _ = linear(x, plain, lora=lora)
                assert torch.equal(y, want), (isa, rows)
                got = linear_backward(dout, packed, x, lora, xa)
                for one, two in zip(got, linear_backward(dout, plain, x, lora, xa), strict=True):
                    assert torch.equal(one, two), (isa, rows)


def test_k_quants_take_the_memory_of_their_blocks() -> None:
    # The file has 4.5, 5.5 and 6.5625 bits for a weight: six bits for a scale where a byte is kept here.
    for kind, bits in (("q4_k", 4.625), ("q5_k", 5.625), ("q6_k", 6.5625)):
        packed = gguf_codes(torch.from_numpy(random_blocks(kind, 64, 4)), kind).pack()
        assert packed.nbytes * 8 == bits * 64 * 1024
        assert packing(kind).nbytes(64, 1024) == packed.nbytes


def test_k_quants_have_whole_blocks_in_every_row() -> None:
    with pytest.raises(ShapeError, match="whole blocks of 256, got K=128"):
        cpu.PackedWeight.empty(1, 32, 128, packing=packing("q4_k"))
    with pytest.raises(ShapeError, match="in blocks of 144"):
        import_gguf(torch.zeros(4, 100, dtype=torch.uint8), "q4_k")
    raw = random_blocks("q5_k", 4, 1)
    raw[0, 1] = 0x7C  # infinity
    raw[0, 0] = 0
    with pytest.raises(ShapeError, match="not finite"):
        import_gguf(torch.from_numpy(raw), "q5_k")


def fp8_weight(e: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (e, n, k), generator=generator(), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    scales = torch.rand(e, -(-n // 128), -(-k // 128), generator=generator(1)) * 1e-3 + 1e-4
    return codes.view(torch.float8_e4m3fn), scales


@pytest.mark.parametrize(("n", "k"), [(256, 384), (130, 200)])
def test_fp8_blocks_keep_their_values(n: int, k: int) -> None:
    codes, scales = fp8_weight(2, n, k)
    full = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :n, :k]
    want = (codes.float() * full).bfloat16()
    packed = import_fp8(codes, scales)
    for isa in cpu.isas(emulated=True):
        with cpu.using(Context(2, isa)):
            assert torch.equal(packed.unpack(), want), isa


def test_gate_and_up_in_fp8_are_parts() -> None:
    codes, scales = fp8_weight(2, 512, 128)
    assert torch.equal(import_fp8(codes, scales, parts=2).unpack(), import_fp8(codes, scales).unpack())
    with pytest.raises(ShapeError, match="share scale blocks"):
        import_fp8(codes[:, :160], scales[:, :2], parts=2)


def test_mxfp4_blocks_keep_their_values() -> None:
    blocks = torch.randint(0, 256, (3, 40, 3, 16), generator=generator(), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 40, 3), generator=generator(1), dtype=torch.uint8)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    want = (E2M1[codes.long()] * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).bfloat16()
    packed = import_mxfp4(blocks, scales, parts=2)
    for isa in cpu.isas(emulated=True):
        with cpu.using(Context(2, isa)):
            assert torch.equal(packed.unpack(), want), isa


@pytest.mark.parametrize("isa", cpu.isas(emulated=True))
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_products_of_imported_weights_are_those_of_their_values(isa: str, kind: str) -> None:
    kinds = gguf.GGMLQuantizationType
    raw = gguf.quants.quantize(np.random.default_rng(0).normal(size=(64, 96)), kinds[kind.upper()])
    packed = import_gguf(torch.from_numpy(raw), kind)
    x = torch.randn(9, 96, generator=generator(2)).bfloat16()
    with cpu.using(Context(2, isa)):
        got = linear(x, packed, out_dtype=torch.float32)[0]
        if isa in ("avx2", "avx512", "avx512vnni"):
            assert torch.equal(got, Panels(packed).product(x))
        else:
            assert torch.equal(got, linear(x, pack(packed.unpack()), out_dtype=torch.float32)[0])


def test_imported_experts_are_a_store() -> None:
    gate_up, down = fp8_weight(3, 512, 128), fp8_weight(3, 128, 256)
    store = ExpertStore(import_fp8(*gate_up, parts=2), import_fp8(*down))
    assert store.format == "fp8"
    plain = ExpertStore.from_tensors(*store.dequantize())
    x = torch.randn(5, 128, generator=generator(3)).bfloat16()
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    weights = torch.rand(5, 2, generator=generator(4))
    with cpu.using(Context(2, "amx_emulated")):  # multiplies weights, not codes
        assert torch.equal(store.forward(x, ids, weights), plain.forward(x, ids, weights))


def test_damaged_codes_are_refused() -> None:
    codes, scales = fp8_weight(1, 128, 128)
    bad = codes.view(torch.uint8).clone()
    bad[0, 0, 0] = 0x7F
    with pytest.raises(ShapeError, match="NaN"):
        import_fp8(bad.view(torch.float8_e4m3fn), scales)
    with pytest.raises(ShapeError, match="NaN"):
        import_mxfp4(torch.zeros(4, 1, 16, dtype=torch.uint8), torch.full((4, 1), 255, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="known: q8_0"):
        import_gguf(torch.zeros(4, 18, dtype=torch.uint8), "iq2_xs")
    with pytest.raises(ShapeError, match="rows"):
        import_fp8(codes, scales.repeat(1, 2, 1))
