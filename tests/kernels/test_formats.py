"""Quantised weights: what the kernels compute with, in every path and on every ISA."""

from __future__ import annotations

import pytest
import torch
from coded_panels import WHOLE, Panels
from torch import Tensor

from hetero import _C
from hetero.errors import ShapeError
from hetero.formats import FORMATS, packing
from hetero.kernels import cpu
from hetero.kernels.cpu import Context, PackedWeight, linear, linear_backward, pack

QUANTISED = [name for name, row in FORMATS.items() if row.group_size and not row.imported]

ERROR = {  # largest relative error of Gaussian weights: by the maximum, by squared error
    "int8": (0.0065, 0.0065),
    "int8_asym": (0.0060, 0.0060),
    "int4": (0.095, 0.089),
    "int4_asym": (0.085, 0.082),
    "fp8": (0.030, 0.030),
    "mxfp4": (0.120, 0.116),
    "nf4": (0.097, 0.092),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed_pair(n: int, k: int, format: str, group: int | None = None) -> tuple[PackedWeight, PackedWeight]:
    """A quantised weight, and in bf16 what it dequantises to."""
    quantised = pack(random(n, k), packing=packing(format, group))
    return quantised, pack(quantised.unpack())


SUMS_CODES = ("avx2", "avx512", "avx512vnni")
"""Instruction sets that multiply codes and scale the sums; the others multiply weights in bf16."""


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("n", "k"), [(32, 32), (96, 160), (33, 47), (7, 200), (130, 288)])
def test_products_have_the_bits_of_their_definition(ctx: Context, format: str, n: int, k: int) -> None:
    quantised, plain = packed_pair(n, k, format)
    for rows in (1, 2, 3, 4, 5, 8, 12, 13, 40):
        x, dy = random(rows, k, seed=rows), random(rows, n, seed=rows + 100)
        got, _ = linear(x, quantised, out_dtype=torch.float32, ctx=ctx)
        if ctx.isa in SUMS_CODES:
            assert torch.equal(got, Panels(quantised).product(x)[:, :n])
        else:
            assert torch.equal(got, linear(x, plain, out_dtype=torch.float32, ctx=ctx)[0])
        got_dx = linear_backward(dy, quantised, x, dx_dtype=torch.float32, ctx=ctx).dx
        assert got_dx is not None
        assert torch.equal(got_dx, linear_backward(dy, plain, x, dx_dtype=torch.float32, ctx=ctx).dx)
        weight = quantised.unpack().double()
        torch.testing.assert_close(got.double(), x.double() @ weight.T, rtol=1e-2, atol=1e-2 * k**0.5)
        torch.testing.assert_close(got_dx.double(), dy.double() @ weight, rtol=1e-4, atol=1e-4 * n**0.5)


@pytest.mark.parametrize("isa", sorted(set(SUMS_CODES) & set(cpu.isas())))
@pytest.mark.parametrize("format", [name for name in WHOLE if not FORMATS[name].imported])
def test_rows_become_whole_numbers_slab_by_slab(isa: str, format: str) -> None:
    quantised, ctx = pack(random(40, 160), packing=packing(format)), Context(2, isa)
    plain = linear(random(9, 160), quantised, out_dtype=torch.float32, ctx=ctx)[0]
    exact = random(9, 160).double() @ (Panels(quantised).weights()[:40].T)
    assert (plain - exact).norm() <= 3e-5 * exact.norm()

    x = random(9, 160)
    x[0], x[1, :32], x[2, 40], x[3] = 0, 0, 3e4, x[3] * 2.0**-90
    x[4, 32:] *= 2.0**-90
    x[5] *= 2.0**100
    x[6] = 1.9921875  # every bit of the mantissa, everywhere
    got = linear(x, quantised, out_dtype=torch.float32, ctx=ctx)[0]
    assert torch.equal(got, Panels(quantised).product(x)[:, :40])
    assert not got[0].any()
    assert torch.equal(linear(x * 2.0**-120, quantised, out_dtype=torch.float32, ctx=ctx)[0][3], got[0])

    x[7, 11], x[8, 159] = torch.nan, -torch.inf
    broken = linear(x, quantised, out_dtype=torch.float32, ctx=ctx)[0]
    assert torch.equal(broken[:7], got[:7])
    assert broken[7:].isnan().all()


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("k", [320, 2336])  # groups and runs that end early
def test_panels_lie_as_they_are_described(format: str, group: int, k: int) -> None:
    if group not in FORMATS[format].group_sizes:
        pytest.skip("the format has no such group")
    packed = pack(random(40, k), packing=packing(format, group))
    panels = Panels(packed)
    wide = [each.repeat_interleave(32, 1)[:40, :k] for each in (panels.scales, panels.minima)]
    assert torch.equal((panels.codes[:40, :k] * wide[0] + wide[1]).bfloat16(), packed.unpack())


@pytest.mark.parametrize("format", QUANTISED)
def test_every_isa_dequantises_to_the_same_bits(format: str) -> None:
    quantised = pack(random(70, 300), packing=packing(format))
    seen = []
    for isa in cpu.isas(emulated=True):
        with cpu.using(Context(2, isa)):
            seen.append(quantised.unpack())
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("format", QUANTISED)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(ctx: Context, format: str) -> None:
    quantised = pack(random(96, 544), packing=packing(format))
    x = random(64, 544, seed=1)
    whole, _ = linear(x, quantised, ctx=ctx)
    for rows in (1, 2, 3, 4, 5, 8, 13, 33):
        assert torch.equal(linear(x[:rows], quantised, ctx=ctx)[0], whole[:rows])
    assert torch.equal(linear(x, quantised, ctx=Context(1, ctx.isa))[0], whole)


@pytest.mark.parametrize("format", QUANTISED)
def test_error_is_that_of_the_format(format: str) -> None:
    weight = random(256, 1024).float() * 0.02
    errors = []
    for search in ("max", "mse"):
        got = pack(weight, packing=packing(format, scale_search=search)).unpack().float()
        errors.append(float((got - weight).norm() / weight.norm()))
    assert errors[0] < ERROR[format][0]
    assert errors[1] < ERROR[format][1]
    assert errors[1] <= errors[0]


@pytest.mark.parametrize("format", QUANTISED)
def test_memory_is_the_formats_arithmetic(format: str) -> None:
    for group in FORMATS[format].group_sizes:
        how = packing(format, group)
        got = PackedWeight.empty(2, 768, 2048, packing=how).nbytes
        assert got == pytest.approx(2 * how.nbytes(768, 2048), rel=0.003)


@pytest.mark.parametrize("format", QUANTISED)
def test_larger_groups_have_larger_errors(format: str) -> None:
    weight = random(64, 512)
    errors = []
    for group in FORMATS[format].group_sizes:
        got = pack(weight, packing=packing(format, group)).unpack()
        errors.append(float((got - weight).double().norm()))
    assert errors == sorted(errors)


@pytest.mark.parametrize("format", QUANTISED)
def test_zero_constant_and_tiny_groups(format: str) -> None:
    weight = torch.zeros(40, 96)
    assert not pack(weight, packing=packing(format)).unpack().any()
    weight[1] = 0.5  # one value
    weight[2, 3] = -3.0  # one outlier
    weight[3] = 1e-30
    weight[4] = 1e30
    got = pack(weight, packing=packing(format, scale_search="mse")).unpack().float()
    assert not got[0].any()
    assert not got[5:].any()
    assert not got[2, 64:].any() or format == "fp8"
    assert got.isfinite().all()
    if format != "fp8":  # rows of a panel share its scale: the small ones vanish beside 1e30
        torch.testing.assert_close(got[1], weight[1], rtol=0.07, atol=0)
        assert got[2, 3] == pytest.approx(-3.0, rel=0.07)
    torch.testing.assert_close(got[4], weight[4], rtol=0.12, atol=0)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(format: str, value: float) -> None:
    weight = random(3, 40, 64)
    weight[1, 7, 50] = value
    with pytest.raises(ShapeError, match="matrix 1 holds NaN or infinity"):
        pack(weight, packing=packing(format))


def test_int8_scales_never_leave_a_tie() -> None:
    """Symmetric int8 rounds without looking for ties: scales with ten odd bits give none."""
    significands = torch.arange(513, 1024, 2, dtype=torch.int64)
    products = (significands[:, None] * torch.arange(1, 128)).flatten()
    low = products & -products
    assert not ((products // low).log2().floor() == 8).any()  # nine bits: halfway between two of eight


def reference_int8(weight: Tensor, group: int) -> Tensor:
    """Symmetric int8 from its description alone."""
    groups = weight.float().unflatten(-1, (-1, group))
    bits = (groups.abs().amax(-1) / 127).view(torch.int32) >> 15
    scale = ((bits << 15) | 0x4000).view(torch.float32)[..., None]
    codes = (groups * (1.0 / scale)).round().clamp(-127, 127)
    return (codes * scale).bfloat16().flatten(-2)


def reference_int4(weight: Tensor, group: int) -> Tensor:
    """Symmetric int4 from its description alone."""
    groups = weight.float().unflatten(-1, (-1, group))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    mantissa, exponent = torch.frexp(extreme)
    scale = torch.ldexp((mantissa * 32).round(), exponent - 5)
    return ((groups * (1.0 / scale)).round().clamp(-8, 7) * scale).bfloat16().flatten(-2)


def reference_asymmetric(weight: Tensor, group: int, bits: int) -> Tensor:
    """Asymmetric integers around a middle, from their description alone."""
    groups = weight.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = 2**bits - 1
    scale = (high / steps - low / steps).bfloat16().float()
    middle = (0.5 * low + 0.5 * high + 0.5 * scale).bfloat16().float()
    codes = ((groups - middle) * (1.0 / scale)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes * scale + middle).bfloat16().flatten(-2)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_and_scales_are_those_of_an_independent_implementation(ctx: Context, group: int) -> None:
    weight = random(48, 384, seed=5)
    for format, want in {
        "int8": reference_int8(weight, group),
        "int4": reference_int4(weight, group),
        "int8_asym": reference_asymmetric(weight, group, 8),
        "int4_asym": reference_asymmetric(weight, group, 4),
    }.items():
        assert torch.equal(pack(weight, packing=packing(format, group)).unpack(), want), format


def test_both_tables_have_the_same_rows() -> None:
    assert _C.formats() == [name for name in FORMATS if name != "bf16"]
    for name in _C.formats():
        assert _C.Format(name).group == FORMATS[name].group_size


def test_words_that_describe_no_packing_are_refused() -> None:
    with pytest.raises(ShapeError, match="not a weight format"):
        packing("int3")
    with pytest.raises(ShapeError, match="group_size=48"):
        packing("int4", 48)
    with pytest.raises(ShapeError, match="no asymmetric form"):
        packing("bf16", symmetric=False)
    with pytest.raises(ShapeError, match="scale_search"):
        packing("int4", scale_search="best")
    assert packing("int4", symmetric=False).format.name == "int4_asym"
