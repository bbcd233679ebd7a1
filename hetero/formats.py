"""The table of weight formats: how many bits a weight takes and how its scales are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store a weight matrix. csrc/formats/table.cc has a row of the same name.

    Attributes:
        name: the name used in recipes and in `ExpertStore(format=...)`.
        bits: bits per weight, without scales.
        group_size: weights that share one scale along K; 0 when there are no scales.
        scale_bits: bits per scale, its minimum included where the format has one.
        group_sizes: the group sizes that can be asked for.
        scale_rows: rows (N) that share one scale.
        imported: whether weights only come as the codes of a checkpoint, never from bf16.
        columns: K is a multiple of it.
    """

    name: str
    bits: int
    group_size: int = 0
    scale_bits: int = 0
    group_sizes: tuple[int, ...] = ()
    scale_rows: int = 1
    imported: bool = False
    columns: int = 1

    def nbytes(self, n: int, k: int, group_size: int | None = None) -> int:
        """Bytes of an [n, k] matrix in this format, scales included, padding not."""
        group = group_size or self.group_size
        scales = -(-n // self.scale_rows) * -(-k // group) * self.scale_bits if group else 0
        return (n * k * self.bits + scales) // 8


_GROUPS = (32, 64, 128)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("bf16", 16),
        Format("int8", 8, 32, 16, _GROUPS),
        Format("int8_asym", 8, 32, 32, _GROUPS),
        Format("int4", 4, 32, 16, _GROUPS),
        Format("int4_asym", 4, 32, 32, _GROUPS),
        Format("fp8", 8, 128, 32, (128,), scale_rows=32),
        Format("mxfp4", 4, 32, 8, (32,)),
        Format("nf4", 4, 64, 16, _GROUPS),
        Format("q8_0", 8, 32, 16, (32,), imported=True),
        Format("q4_0", 4, 32, 16, (32,), imported=True),
        Format("q4_1", 4, 32, 32, (32,), imported=True),
        # Two bytes for 32 weights and two halves for 256; a byte for 16 and a half for 256.
        Format("q4_k", 4, 32, 20, (32,), imported=True, columns=256),
        Format("q5_k", 5, 32, 20, (32,), imported=True, columns=256),
        Format("q6_k", 6, 16, 9, (16,), imported=True, columns=256),
    )
}

LOADABLE = tuple(name for name, row in FORMATS.items() if not row.imported)
"""Formats that a bf16 checkpoint can be loaded in."""

SCALE_SEARCHES = ("max", "mse")

AUTO = "auto"
"""The format in which a checkpoint holds its experts."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How to pack a weight.

    Attributes:
        format: a row of `FORMATS`.
        group_size: weights per scale; 0 without scales.
        scale_search: "max": the scale just holds the largest weight of its group; "mse": the scale, of some
            30 candidates, with the least squared error (smaller error, slower packing).
    """

    format: Format
    group_size: int = 0
    scale_search: str = "max"

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of an [n, k] matrix, scales included, padding not."""
        return self.format.nbytes(n, k, self.group_size)


BF16 = Packing(FORMATS["bf16"])


def packing(
    format: str,
    group_size: int | None = None,
    symmetric: bool | None = None,
    scale_search: str = "max",
) -> Packing:
    """The `Packing` that these words describe: group_size None is the format's own, symmetric=False takes the
    format's asymmetric form ("int4" -> "int4_asym").

    Raises: ShapeError for a format or a combination that does not exist.
    """
    name = f"{format}_asym" if symmetric is False and not format.endswith("_asym") else format
    if name not in FORMATS:
        if format in FORMATS:
            raise ShapeError(f"format {format!r} has no asymmetric form; drop symmetric=False")
        raise ShapeError(f"{format!r} is not a weight format; hetero has {', '.join(FORMATS)}")
    row = FORMATS[name]
    if symmetric and name.endswith("_asym"):
        raise ShapeError(f"format {format!r} is asymmetric; drop symmetric=True")
    if scale_search not in SCALE_SEARCHES:
        raise ShapeError(f"scale_search={scale_search!r} is not one of {', '.join(SCALE_SEARCHES)}")
    if group_size is not None and not row.group_size:
        raise ShapeError(f"format {name!r} has no scales, so group_size={group_size} means nothing; drop it")
    if group_size is not None and group_size not in row.group_sizes:
        allowed = ", ".join(map(str, row.group_sizes))
        raise ShapeError(f"group_size={group_size} is not one that {name!r} has: {allowed}")
    return Packing(row, group_size or row.group_size, scale_search) if row.group_size else BF16


def chosen_packing(
    format: str,
    group_size: int | None = None,
    symmetric: bool | None = None,
    scale_search: str = "max",
) -> Packing | None:
    """How experts are packed: as `packing` says, or None for "auto": they stay as the checkpoint has them.

    Raises: ShapeError, also for an option that would mean nothing, and for a format of codes that exist.
    """
    if format == AUTO:
        for name, value in (("group_size", group_size), ("symmetric", symmetric)):
            if value is not None:
                raise ShapeError(f"{name}={value} means nothing without a format; name one, such as 'int4'")
        if scale_search not in SCALE_SEARCHES:
            raise ShapeError(f"scale_search={scale_search!r} is not one of {', '.join(SCALE_SEARCHES)}")
        return None
    return made(packing(format, group_size, symmetric, scale_search))


def made(packing: Packing) -> Packing:
    """`packing`, if weights can be quantised to it. Raises ShapeError for a format of codes that exist."""
    if packing.format.imported:
        raise ShapeError(
            f"format {packing.format.name!r} takes the codes of a GGUF file and cannot be made of bf16: "
            f"{AUTO!r} keeps what such a file holds in its experts, or choose int8 or int4"
        )
    return packing
