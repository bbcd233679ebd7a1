"""Reads rows from files: jsonl, json, csv, tsv, parquet, plain or compressed. Every row knows where it
stands."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from hetero.errors import DataError, UnavailableError

Row: TypeAlias = dict[str, Any]
"""Column name -> value."""

Located: TypeAlias = "tuple[Row, str]"
"""A row and its place, such as `train.jsonl line 7`."""

_COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, "": open}


def read_rows(path: Path) -> Iterator[Located]:
    """The rows of a file in its order, each with its place.

    The kind is told by the suffix (`.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet`), after which
    `.gz`, `.bz2` or `.xz` may follow. Text is UTF-8, with or without a byte order mark. Values of csv and tsv
    are text.

    Raises:
        DataError: no such file, an unknown suffix, or a row that cannot be read (with its line).
        UnavailableError: parquet without pyarrow.
    """
    if not path.is_file():
        raise DataError(f"There is no data file {path} (looked in {Path.cwd()}).")
    packed = path.suffix.lower() if path.suffix.lower() in _COMPRESSED else ""
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    reader = _READERS.get(suffix)
    if reader is None:
        raise DataError(
            f"{path}: cannot tell the kind of this file. Its name must end in one of "
            f"{', '.join(_READERS)}, which .gz, .bz2 "
            "or .xz may follow."
        )
    if reader is _parquet:
        if packed:
            raise DataError(
                f"{path}: parquet is compressed inside; unpack the file and name the .parquet itself."
            )
        return _parquet(path, path.name)
    return reader(_text(path, packed), path.name)


def _text(path: Path, packed: str) -> str:
    try:
        with _COMPRESSED[packed](path, "rb") as file:
            data: bytes = file.read()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Is it complete, and really a {packed or 'plain'} file?"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} line {line}: byte 0x{data[error.start]:02x} is not UTF-8. Convert the file, such as "
            "with "
            f"`iconv -f latin1 -t utf-8`."
        ) from None


def _jsonl(text: str, name: str) -> Iterator[Located]:
    # Not str.splitlines(): a JSON string may hold U+2028 and its kind unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{name} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}: not JSON ({error.msg} at column {error.colno}). Each line is one object."
                ) from None
            yield _object(row, where), where


def _json(text: str, name: str) -> Iterator[Located]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One object per line is .jsonl: rename the file." if error.msg == "Extra data" else ""
        raise DataError(
            f"{name} line {error.lineno}: not JSON ({error.msg} at column {error.colno}).{hint}"
        ) from None
    if isinstance(data, dict):
        lists = [key for key, value in data.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(
                f"{name}: expected a list of rows, or an object that holds exactly one, got keys "
                f"{list(data)[:8]}."
            )
        data = data[lists[0]]
    if not isinstance(data, list):
        raise DataError(f"{name}: expected a list of rows, got {type(data).__name__}.")
    for number, row in enumerate(data, 1):
        where = f"{name} row {number}"
        yield _object(row, where), where


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with one key per column, got {type(row).__name__}.")
    return row


def _separated(text: str, name: str, delimiter: str) -> Iterator[Located]:
    previous = csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header: list[str] | None = None
        begin = 1
        for fields in reader:
            where, begin = f"{name} line {begin}", reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = fields
                if len(set(header)) != len(header):
                    raise DataError(f"{where}: the header names a column twice: {header}.")
            elif len(fields) != len(header):
                raise DataError(
                    f"{where}: {len(fields)} fields, but the header has {len(header)} "
                    f"({', '.join(header)}). Put fields that "
                    "hold the separator or a line break in double quotes."
                )
            else:
                yield dict(zip(header, fields, strict=True)), where
    except csv.Error as error:
        raise DataError(
            f"{name} line {reader.line_num}: not valid {delimiter!r}-separated text ({error})."
        ) from None
    finally:
        csv.field_size_limit(previous)


def _csv(text: str, name: str) -> Iterator[Located]:
    return _separated(text, name, ",")


def _tsv(text: str, name: str) -> Iterator[Located]:
    return _separated(text, name, "\t")


def _parquet(path: Path | str, name: str) -> Iterator[Located]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UnavailableError(
            f"{path}: parquet needs pyarrow. `pip install pyarrow`, or write the rows as .jsonl."
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:
        raise DataError(f"{path}: cannot be read as parquet ({error}).") from None
    for number, row in enumerate(rows, 1):
        yield row, f"{name} row {number}"


_READERS: dict[str, Callable[..., Iterator[Located]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
