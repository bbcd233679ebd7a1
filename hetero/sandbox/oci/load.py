"""Images in the store: each layer is unpacked once, under the digest of its tar stream."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from hetero.sandbox.errors import ImageError
from hetero.sandbox.launcher import tree
from hetero.sandbox.oci.cache import directory, hold
from hetero.sandbox.oci.layout import Blob, Files, find, opened
from hetero.sandbox.oci.limits import Hashed, ImageLimits, decompressed
from hetero.sandbox.oci.unpack import Layer
from hetero.sandbox.store import private_directory


def load(
    path: Path, ref: str | None = None, limits: ImageLimits | None = None
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(layer directories, newest first; the image's environment). Raises ImageError; nothing of a layer that
    fails is kept."""
    limits = limits or ImageLimits()
    cache = directory()
    with opened(path) as files:
        found = find(files, ref)
        num_bytes = num_entries = 0
        for blob in dict.fromkeys(found.layers):
            while not hold(str(cache / blob.diff)):
                num_bytes, num_entries = _unpack(files, blob, cache, limits, num_bytes, num_entries)
    return tuple(str(cache / blob.diff) for blob in reversed(found.layers)), found.env


def _unpack(
    files: Files, blob: Blob, cache: Path, limits: ImageLimits, num_bytes: int, num_entries: int
) -> tuple[int, int]:
    part = private_directory(cache / f"{blob.diff}.{secrets.token_hex(4)}.part")
    lock = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)  # nobody takes it for the leftovers of a process that was killed
    try:
        root = private_directory(part / "layer")
        root.chmod(0o755)
        with files.open(blob.name) as file:
            packed = Hashed(file, limits.bytes, f"The layer {blob.name}")
            inner = Hashed(decompressed(packed), limits.bytes - num_bytes, "The image, unpacked,")
            layer = Layer(root, limits, num_entries)
            layer.unpack(inner)
            inner.drain()
            packed.drain()
        inner.check(blob.diff)
        if blob.digest:
            packed.check(blob.digest)
        if not (cache / blob.diff).is_dir():  # another process may have been faster
            root.rename(cache / blob.diff)
    except KeyError as error:
        raise ImageError(f"The image lacks the layer {error}.", "Fetch it again.") from error
    finally:
        tree.remove(str(part))
        os.close(lock)
    return num_bytes + inner.total, layer.num_entries
