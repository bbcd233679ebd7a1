"""Fewer layers with the same content: files are hard-linked, so nothing is copied."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from hetero.sandbox.launcher import tree
from hetero.sandbox.store import give

_OPAQUE = "user.overlay.opaque"


def merge(layers: Sequence[str], target: str) -> None:
    """Put the sum of `layers` (newest first) into the empty directory `target`, deletions included: what lies
    below the layers stays hidden as it was."""
    for layer in reversed(layers):
        _apply(layer, target)


def _apply(source: str, target: str) -> None:
    for name in _names(source):
        newer, made = os.path.join(source, name), os.path.join(target, name)
        status = os.lstat(newer)
        if not stat.S_ISDIR(status.st_mode):
            tree.remove(made)
            if stat.S_ISCHR(status.st_mode):
                os.mknod(made, stat.S_IFCHR, 0)
            else:
                os.link(newer, made, follow_symlinks=False)
            continue
        opaque = _is_opaque(newer)
        if opaque or not (os.path.isdir(made) and not os.path.islink(made)):
            below_is_hidden = opaque or os.path.lexists(made)
            tree.remove(made)
            os.mkdir(made, 0o700)
            give(made)
            if below_is_hidden:
                os.setxattr(made, _OPAQUE, b"y")
        _apply(newer, made)
        os.chmod(made, stat.S_IMODE(status.st_mode))
        os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))


def _names(directory: str) -> list[str]:
    """Entries, also of a directory that its owner may not read."""
    mode = stat.S_IMODE(os.lstat(directory).st_mode)
    if mode & 0o500 != 0o500:
        os.chmod(directory, mode | 0o700)
    return sorted(os.listdir(directory))


def _is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, _OPAQUE) == b"y"
    except OSError:
        return False
