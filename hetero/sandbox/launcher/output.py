"""What is kept of an output stream: its head and its tail, however much comes."""

from __future__ import annotations


class Kept:
    """Keeps the first and the last half of `room` bytes."""

    def __init__(self, room: int) -> None:
        self.total = 0
        self._half = max(room // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Take what was read."""
        self.total += len(data)
        free = self._half - len(self._head)
        if free > 0:
            self._head += data[:free]
            data = data[free:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half:
                del self._tail[: -self._half]

    @property
    def truncated(self) -> bool:
        """Whether something in the middle was let go."""
        return self.total > 2 * self._half

    def value(self) -> bytes:
        """Head, a note of how much is left out, tail."""
        tail = bytes(self._tail[-self._half :])
        if not self.truncated:
            return bytes(self._head) + tail
        left_out = self.total - len(self._head) - len(tail)
        return bytes(self._head) + f"\n[... {left_out} bytes left out ...]\n".encode() + tail
