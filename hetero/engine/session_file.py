"""A session as a file: what was said, and its keys and values, with checksums."""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from hetero.errors import CheckpointError, ModelError

MAGIC = b"HETEROKS"
_PREFIX = struct.Struct("<8sIQI")  # magic, format version, bytes of the description, its CRC
_VERSION = 1


@dataclass(frozen=True)
class Description:
    """Everything of a session but the blocks.

    Attributes:
        fingerprint: of weights, adapter and arithmetic that made the blocks.
        token_ids, logprobs, stream, seed: as in `Session`.
        num_computed: leading tokens that the blocks hold.
        bytes_per_block: size of each block.
        crcs: CRC of each block.
    """

    fingerprint: dict[str, str]
    token_ids: list[int]
    logprobs: list[float | None]
    stream: tuple[int, int]
    seed: int
    num_computed: int
    bytes_per_block: int
    crcs: list[int]


def write_session(path: Path, description: Description, blocks: Iterable[npt.NDArray[np.uint8]]) -> None:
    """Write a file, all at once: until it is whole, what was there before stays."""
    text = json.dumps(asdict(description)).encode()
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(staging, "wb") as file:
            file.write(_PREFIX.pack(MAGIC, _VERSION, len(text), zlib.crc32(text)))
            file.write(text)
            for block in blocks:
                file.write(block.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def read_description(file: BinaryIO) -> Description:
    """The description at the beginning of a file. Raises CheckpointError unless it is whole."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) == _PREFIX.size:
        magic, version, length, crc = _PREFIX.unpack(prefix)
        if magic == MAGIC and version == _VERSION and length <= os.fstat(file.fileno()).st_size:
            text = file.read(length)
            if len(text) == length and zlib.crc32(text) == crc:
                found = json.loads(text)
                return Description(**{**found, "stream": tuple(found["stream"])})
    raise CheckpointError(
        f"{file.name} is not a whole session of this version of hetero. Export it again with "
        "engine.export_session."
    )


def check_fingerprint(path: Path, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise ModelError, saying what differs, unless the session was made by what runs here."""
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if names:
        parts = ", ".join(f"{name} ({theirs.get(name)} there, {ours.get(name)} here)" for name in names)
        raise ModelError(
            f"The session in {path} was made by another model or another build: they differ in {parts}. Its "
            "keys and values would be wrong here. Load the same model and adapter, or pass the tokens to "
            "engine.session to compute them again."
        )
