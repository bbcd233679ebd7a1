"""Frames on a stream socket between the owner and a worker: four bytes of length, then marshalled plain
values.

Both ends are ours and run the same interpreter; nothing from inside a box is ever unmarshalled, it only
travels as bytes objects.
"""

from __future__ import annotations

import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER = struct.Struct("!I")
LARGEST = 1 << 30


def pack(message: Any) -> bytes:
    """One frame."""
    body = marshal.dumps(message)
    return HEADER.pack(len(body)) + body


def send(handle: int, message: Any) -> None:
    """Write one frame to a blocking descriptor. Raises OSError."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(handle, view) :]


def receive(handle: int) -> Any:
    """The next frame; None when the other end is gone. Raises OSError."""
    header = _exactly(handle, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if length > LARGEST:
        raise OSError(90, f"a frame of {length} bytes; at most {LARGEST} are sent")
    body = _exactly(handle, length)
    return None if body is None else marshal.loads(body)


def _exactly(handle: int, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = os.read(handle, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Splitter:
    """Frames out of bytes as they come."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The frames that `data` completes."""
        self._held += data
        found = []
        while len(self._held) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._held)
            if len(self._held) < HEADER.size + length:
                break
            found.append(marshal.loads(bytes(self._held[HEADER.size : HEADER.size + length])))
            del self._held[: HEADER.size + length]
        return found
