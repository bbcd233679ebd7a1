"""Keeps the pages of memory-mapped checkpoint files from piling up while a model loads.

Safetensors and the reader of GGUF hand out tensors that are views of the mapped file. Once a tensor is packed
its pages are of no use, but they count as this process's memory until the kernel takes them back.
`release_file_pages` gives them back at once; they stay in the page cache, so that loading the same file again
is as fast as before.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from torch import nn

SUFFIXES = (".safetensors", ".gguf")
SHARE = 32
"""At most about a 32nd of the packed bytes stay resident as file pages."""
_DONTNEED = 4  # MADV_DONTNEED of Linux
_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+(.*)$")


class PageKeeper:
    """Releases file pages whenever a share of what was packed so far has come in.

    A share, because looking at the mappings takes longer the more memory there is.

    Args:
        step: the fewest bytes between two releases.
    """

    def __init__(self, step: int = 64 << 20) -> None:
        self.step = step
        self.start()

    def start(self) -> None:
        """Another model starts to load."""
        self._total = self._since = 0

    def packed(self, nbytes: int) -> None:
        """Note that `nbytes` of checkpoint tensors have been packed."""
        self._total += nbytes
        self._since += nbytes
        if self._since >= max(self.step, self._total // SHARE):
            self._since = 0
            release_file_pages()


def release_file_pages() -> int:
    """Drop the resident pages of mapped checkpoint files from this process; returns the bytes so mapped.

    Pages that were written to (private copies) would lose their contents, so a mapping with any is left
    alone. Does nothing where there is no /proc.
    """
    released = 0
    for start, stop, clean in _mappings():
        if clean and _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED) == 0:
            released += stop - start
    return released


def own_parameters(model: nn.Module) -> None:
    """Move parameters that lie in a mapped checkpoint file to memory of their own, so the file may go."""
    mapped = [(start, stop) for start, stop, _ in _mappings()]
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and any(start <= tensor.data_ptr() < stop for start, stop in mapped):
            tensor.data = tensor.data.clone()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mappings() -> Iterator[tuple[int, int, bool]]:
    """(first address, address after, whether no page is a private copy) of every mapped checkpoint file."""
    current: tuple[int, int] | None = None
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        header = _HEADER.match(line)
        if header:
            current = (int(header[1], 16), int(header[2], 16)) if header[3].endswith(SUFFIXES) else None
        elif current is not None and line.startswith("Anonymous:"):
            yield *current, line.split()[1] == "0"
