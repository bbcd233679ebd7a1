"""A directory of block files, shared by any number of processes and within a budget of bytes.

A file is named after its content and appears whole, by renaming, so that a reader sees all of it or nothing;
what a crash of the machine or the disk itself does to it later is found by its checksums. Files are never
changed. The ones used longest ago go first when the budget is spent.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero.engine.tiers.block_file import HEADER_BYTES, BlockName, header, is_whole
from hetero.errors import CapacityError, UnavailableError

SUFFIX = ".kv"
_NAMES = re.compile(r"[0-9a-f]{32}")
_ABANDONED = 600.0  # seconds after which an unfinished file belongs to nobody
_LOW = 0.9  # of the budget: where trimming stops
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Blocks of a KV cache; may be deleted at any time.\n"


class BlockDirectory:
    """Stores and finds blocks by name.

    Args:
        path: made if it is not there.
        budget: most bytes that the files may take, whoever wrote them.
        bytes_per_block: payload of one block.

    Raises:
        UnavailableError: the directory cannot be made or written.
        CapacityError: the budget does not hold one block.
    """

    def __init__(self, path: str | os.PathLike[str], *, budget: int, bytes_per_block: int) -> None:
        self.path = Path(path)
        self.file_bytes = HEADER_BYTES + bytes_per_block
        if budget < self.file_bytes:
            raise CapacityError(
                f"kv_disk_size is {budget} bytes; one block of this model takes {self.file_bytes}. Give it "
                "at least some hundred blocks, or leave kv_disk out."
            )
        self._budget = budget
        self._used: int | None = None  # what the last look at the directory and our own writes say
        self._unseen = 0  # bytes written since that look
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "CACHEDIR.TAG").write_text(_TAG)
        except OSError as error:
            raise UnavailableError(
                f"kv_disk {str(self.path)!r} cannot be used: {error}. Name a directory that can be written."
            ) from error

    def file(self, name: BlockName) -> Path:
        """Where the block is, if it is there."""
        return self.path / name.root.hex() / f"{name.content_id.hex()}{SUFFIX}"

    def has(self, name: BlockName) -> bool:
        """Whether there is a file for the block; only `load` knows whether it is whole."""
        return self.file(name).exists()

    def load(self, name: BlockName, out: npt.NDArray[np.uint8]) -> bool | None:
        """Read a block into `out` [bytes_per_block]: True, or None without a file, or False with a bad one.

        A bad file is removed. Whatever the answer but True, `out` holds nothing of use.
        """
        path = self.file(name)
        try:
            with open(path, "rb", buffering=0) as file:
                head, payload = file.read(HEADER_BYTES), out.data
                whole = file.readinto(payload) == payload.nbytes and not file.read(1)
                if whole and is_whole(name, head, payload):
                    os.utime(file.fileno())  # used just now
                    return True
        except FileNotFoundError:
            return None
        except OSError:
            return False
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def store(self, name: BlockName, data: npt.NDArray[np.uint8]) -> bool:
        """Write a block unless it is there; whether it was written. Raises OSError when the disk refuses."""
        if self.has(name):
            return False
        if (
            self._used is None
            or self._used + self.file_bytes > self._budget
            or self._unseen > self._budget // 8
        ):
            self.trim()
        path = self.file(name)
        staging = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(staging, "wb", buffering=0) as file:
                for part in (memoryview(header(name, data.data)), data.data):
                    while part:
                        part = part[file.write(part) :]
            os.replace(staging, path)
        except OSError:
            with contextlib.suppress(OSError):
                staging.unlink()
            raise
        assert self._used is not None
        self._used += self.file_bytes
        self._unseen += self.file_bytes
        return True

    def trim(self) -> None:
        """Look at what is there; remove unfinished files that nobody finishes, and the oldest over budget."""
        files = sorted(self._files())
        self._used, self._unseen = sum(size for _, size, _ in files), 0
        files = [file for file in files if file[2].suffix == SUFFIX]
        if self._used + self.file_bytes <= self._budget:
            return
        for _, size, path in files:
            if self._used + self.file_bytes <= _LOW * self._budget or self._used == 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            self._used -= size
        for folder in self._folders():
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _folders(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (p for p in self.path.iterdir() if _NAMES.fullmatch(p.name))

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of our files; anything else in the directory is left alone."""
        for folder in self._folders():
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        stat = entry.stat()
                        if entry.name.endswith(".tmp") and time.time() - stat.st_mtime > _ABANDONED:
                            os.unlink(entry.path)
                        elif entry.name.endswith((SUFFIX, ".tmp")):
                            yield stat.st_mtime, stat.st_size, Path(entry.path)
