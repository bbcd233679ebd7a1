"""The bytes of one block on disk: a header that says whose they are, then the payload, both with a CRC."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from hetero.kernels.batch import KV_BLOCK

MAGIC = b"HETEROKV"
VERSION = 1
_HEADER = struct.Struct(
    "<8sII16s16sQI"
)  # magic, version, tokens, root, content id, payload bytes, payload CRC
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


@dataclass(frozen=True, slots=True)
class BlockName:
    """Which block: 16 bytes for the weights and arithmetic that made it, 16 for the tokens up to its end."""

    root: bytes
    content_id: bytes


def root_of(fingerprint: Mapping[str, str]) -> bytes:
    """16 bytes for everything that keys and values depend on but the tokens."""
    return blake2b(json.dumps(fingerprint, sort_keys=True).encode(), digest_size=16).digest()


def header(name: BlockName, payload: memoryview) -> bytes:
    """The header [HEADER_BYTES] of a block's file."""
    fields = _HEADER.pack(
        MAGIC, VERSION, KV_BLOCK, name.root, name.content_id, payload.nbytes, zlib.crc32(payload)
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def is_whole(name: BlockName, head: bytes, payload: memoryview) -> bool:
    """Whether header and payload are those of the block `name`, every bit of them.

    Equality with the header that we would write checks magic, version, geometry, names, length and both CRCs
    at once.
    """
    return head == header(name, payload)
