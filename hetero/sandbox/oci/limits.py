"""How large an image may be, and the reader that holds it to that."""

from __future__ import annotations

import hashlib
import importlib
import zlib
from dataclasses import dataclass
from typing import Protocol

from hetero.sandbox.errors import ImageError

_CHUNK = 1 << 20
_ZSTD = ("compression.zstd", "zstandard")
_WINDOW_LOG = 27
"""A stream may ask for so much memory, 128 MB, and no more."""


@dataclass(frozen=True)
class ImageLimits:
    """Sums over all layers of an image, unpacked. `bytes`: of their tar streams; `entries`: names in them."""

    bytes: int = 16 << 30
    entries: int = 1_000_000


class Readable(Protocol):
    """Something to read from."""

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; b"" at the end."""


class Hashed:
    """Reads through, and knows the SHA-256 and the number of what was read. Raises ImageError past `most`."""

    def __init__(self, source: Readable, most: int, what: str) -> None:
        self._source, self._most, self._what = source, most, what
        self._digest = hashlib.sha256()
        self.total = 0

    def read(self, size: int = -1, /) -> bytes:
        """At most a megabyte."""
        data = self._source.read(_CHUNK if size < 0 else min(size, _CHUNK))
        self.total += len(data)
        if self.total > self._most:
            raise ImageError(
                f"{self._what} is larger than {self._most} bytes.",
                "Raise ImageLimits.bytes if that is right.",
            )
        self._digest.update(data)
        return data

    def drain(self) -> None:
        """Read what is left."""
        while self.read():
            pass

    def check(self, wanted: str) -> None:
        """Raise ImageError unless what was read is what was named."""
        if self._digest.hexdigest() != wanted:
            raise ImageError(
                f"{self._what} has SHA-256 {self._digest.hexdigest()}, not {wanted} as the image says.",
                "The image is damaged or was changed; fetch it again.",
            )


class Inflated:
    """A gzip stream, inflated in bounded steps whatever its ratio."""

    def __init__(self, source: Readable, start: bytes) -> None:
        self._source, self._held = source, start
        self._inflate = zlib.decompressobj(wbits=31)

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes."""
        wanted = _CHUNK if size < 0 else size
        while True:
            data = self._held or self._source.read(_CHUNK)
            if not data:
                if not self._inflate.eof:
                    raise ImageError("A layer's gzip stream ends early.", "Fetch the image again.")
                return b""
            if self._inflate.eof:  # one more gzip member follows
                self._inflate = zlib.decompressobj(wbits=31)
            try:
                found = self._inflate.decompress(data, wanted)
            except zlib.error as error:
                raise ImageError(f"A layer's gzip stream is broken: {error}.") from error
            self._held = self._inflate.unconsumed_tail or self._inflate.unused_data
            if found:
                return found


class Plain:
    """A stream whose first bytes were looked at."""

    def __init__(self, source: Readable, start: bytes) -> None:
        self._source, self._start = source, start

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes."""
        if self._start:
            count = len(self._start) if size < 0 else size
            found, self._start = self._start[:count], self._start[count:]
            return found
        return self._source.read(size)


class Zstd:
    """A zstd stream. Frames follow each other, as in layers that can be fetched in parts."""

    def __init__(self, source: Readable) -> None:
        for name in _ZSTD:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            self._error: type[Exception] = module.ZstdError
            if name == "zstandard":
                made = module.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
                self._reader: Readable = made.stream_reader(source, read_across_frames=True)
            else:
                options = {module.DecompressionParameter.window_log_max: _WINDOW_LOG}
                self._reader = module.ZstdFile(source, options=options)
            return
        raise ImageError(
            "A layer is compressed with zstd, which needs Python 3.14 or the package zstandard.",
            "pip install zstandard",
        )

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes."""
        try:
            return self._reader.read(_CHUNK if size < 0 else size)
        except (self._error, EOFError) as error:
            raise ImageError(f"A layer's zstd stream is broken: {error}.", "Fetch it again.") from error


def decompressed(source: Readable) -> Readable:
    """The tar stream of a layer: plain, gzip, or zstd where that can be read. Raises ImageError."""
    start = source.read(4)
    if start[:2] == b"\x1f\x8b":
        return Inflated(source, start)
    if start == b"\x28\xb5\x2f\xfd" or (start[1:] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):
        return Zstd(Plain(source, start))
    return Plain(source, start)
