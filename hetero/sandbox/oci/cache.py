"""The unpacked layers of images in the store: who uses them, and what may go.

Beside each layer lies a file on which every process that uses the layer holds a shared lock until it ends.
Its time stamp says when the layer was last asked for. Who removes layers needs the lock for itself.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from pathlib import Path

from hetero.sandbox.launcher import tree
from hetero.sandbox.store import store_root

_UNPACKING_S = 60.0
"""Until then who unpacks has locked what it makes."""
_held: dict[str, int] = {}
_guard = threading.Lock()


def directory() -> Path:
    """Where the layers are."""
    found = store_root() / "images"
    found.mkdir(mode=0o755, parents=True, exist_ok=True)
    return found


def hold(layer: str) -> bool:
    """Keep a layer as long as this process lives; whether it is there. Nobody removes those elsewhere."""
    path = Path(layer)
    if path.parent != store_root() / "images" or not path.is_dir():
        return path.is_dir()
    with _guard:
        if layer not in _held:
            _held[layer] = _locked(_sign(path), fcntl.LOCK_SH)
        os.utime(_held[layer])
    return path.is_dir()


def collect(older_than_s: float) -> list[str]:
    """Remove layers that no process uses and none has asked for in so long; their names. What is left of a
    layer whose unpacking was killed goes, too."""
    removed = []
    here = directory()
    for name in sorted({path.name.removesuffix(".used") for path in here.iterdir()}):
        path, half = here / name, name.endswith(".part")
        try:
            handle = _locked(path if half else _sign(path), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, or being removed by another
            continue
        gone = here / f"{secrets.token_hex(4)}.part"
        try:
            if time.time() - os.fstat(handle).st_mtime < (_UNPACKING_S if half else older_than_s):
                continue
            if path.is_dir():
                path.rename(gone)
                removed.append(name)
            _sign(path).unlink(missing_ok=True)
        finally:
            os.close(handle)
        tree.remove(str(gone))
    return removed


def _sign(layer: Path) -> Path:
    return layer.with_name(layer.name + ".used")


def _locked(path: Path, how: int) -> int:
    """A descriptor of the file with a lock that still counts: not one of a file that is gone meanwhile."""
    while True:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, how)
            if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
