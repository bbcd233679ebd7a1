"""Messages between the trainer, the reward supervisor and its workers: a JSON header and raw bytes behind
it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

_SIZES = struct.Struct(">IQ")
_CHUNK = 1 << 16


def frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One message. The header must be plain JSON; whoever receives it need not trust the sender."""
    text = json.dumps(header).encode()
    return _SIZES.pack(len(text), len(body)) + text + body


class Inbox:
    """Cuts what arrives at a descriptor into messages; ValueError for one longer than `max_bytes`."""

    def __init__(self, fd: int, max_bytes: int | None = None) -> None:
        self.fd = fd
        self.open = True
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Read once (blocking if the descriptor is), then yield the whole messages there are. At the end
        `open` is False."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.open = False
        self._buffer += data
        while len(self._buffer) >= _SIZES.size:
            num_header, num_body = _SIZES.unpack_from(self._buffer)
            end = _SIZES.size + num_header + num_body
            if self._max_bytes is not None and end > self._max_bytes:
                raise ValueError(f"a message of {end} bytes, more than {self._max_bytes}")
            if len(self._buffer) < end:
                return
            header = json.loads(self._buffer[_SIZES.size : _SIZES.size + num_header])
            body = bytes(self._buffer[_SIZES.size + num_header : end])
            del self._buffer[:end]
            yield header, body


class Outbox:
    """Sends messages through a non-blocking descriptor as fast as the other side takes them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = bytearray()

    def put(self, message: bytes) -> None:
        """Queue a message and send what goes."""
        self._buffer += message
        self.flush()

    def flush(self) -> None:
        """Send what goes. If the other side is gone, what was queued is dropped: its end of file tells the
        rest."""
        try:
            while self._buffer:
                del self._buffer[: os.write(self.fd, self._buffer[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:
            self._buffer.clear()

    @property
    def waiting(self) -> bool:
        """Whether there is more to send."""
        return bool(self._buffer)
