"""Trees of files that are copied: a stack of layers poured into one directory, and what has changed in it."""

from __future__ import annotations

import errno
import fcntl
import marshal
import os
import stat
import time

from hetero.sandbox.launcher import tree
from hetero.sandbox.launcher.layers import is_opaque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FICLONE = 0x40049409
_CLOCK_STEP_S = 0.012
"""Time stamps lag behind the clock by up to a tick: what comes later must have later ones."""


def fill(request: dict[str, Any]) -> dict[str, Any]:
    """Copy `layers` (newest first) into the empty directory `target`; deletions of one layer hide what older
    ones have. With `inventory`, note there what the tree holds.

    Returns bytes and entries of the result.
    """
    target = request["target"]
    for layer in reversed(request["layers"]):
        _pour(layer, target)
    found = _entries(target)
    if request["inventory"]:
        time.sleep(_CLOCK_STEP_S)
        with open(request["inventory"], "wb") as file:
            marshal.dump({path: entry[:3] for path, entry in found.items()}, file)
    return {"bytes": sum(entry[3] for entry in found.values()), "entries": len(found)}


def _pour(source: str, target: str) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            made = os.path.join(target, entry.name)
            status = entry.stat(follow_symlinks=False)
            mode = status.st_mode
            if stat.S_ISDIR(mode):
                if is_opaque(entry.path) or not os.path.isdir(made) or os.path.islink(made):
                    tree.remove(made)
                    os.mkdir(made, 0o700)
                _pour(entry.path, made)
            else:
                tree.remove(made)
                if not _make(entry.path, made, status):
                    continue
            if not stat.S_ISLNK(mode):
                os.chmod(made, stat.S_IMODE(mode))
            os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _make(source: str, made: str, status: os.stat_result) -> bool:
    """Copy what is no directory; False for what is not copied: deletions, sockets, devices."""
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), made)
    elif stat.S_ISREG(status.st_mode):
        _copy(source, made)
    elif stat.S_ISFIFO(status.st_mode):
        os.mkfifo(made)
    else:
        return False
    return True


def _copy(source: str, made: str) -> None:
    reader = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writer = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.ioctl(writer, _FICLONE, reader)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            while os.sendfile(writer, reader, None, 1 << 24):  # the file system cannot share blocks
                pass
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _entries(root: str) -> dict[str, tuple[int, int, int, int]]:
    """Path -> (type, inode, ctime_ns, bytes on disk) of everything below `root`."""
    found = {}
    pending = [""]
    while pending:
        below = pending.pop()
        try:
            with os.scandir(os.path.join(root, below)) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    path = os.path.join(below, entry.name)
                    kind = stat.S_IFMT(status.st_mode)
                    found[path] = (kind, status.st_ino, status.st_ctime_ns, status.st_blocks * 512)
                    if kind == stat.S_IFDIR:
                        pending.append(path)
        except PermissionError:  # the box took its own rights away; what is below cannot be told
            continue
    return found


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Differences of the tree from its inventory, by time stamps that a box cannot set."""
    with open(request["inventory"], "rb") as file:
        before: dict[str, tuple[int, int, int]] = marshal.load(file)
    now = _entries(request["tree"])
    found = [("D", path) for path in before if path not in now]
    gone = {path for _, path in found}
    found = [("D", path) for path in sorted(gone) if os.path.dirname(path) not in gone]
    for path, (kind, inode, changed, _) in now.items():
        shown = path + "/" * (kind == stat.S_IFDIR)
        was = before.get(path)
        if was is None:
            found.append(("A", shown))
        elif kind != was[0] or inode != was[1] or (kind != stat.S_IFDIR and changed != was[2]):
            found.append(("M", shown))
    limit = request["max_entries"]
    return {"changes": sorted(found, key=lambda pair: pair[1])[:limit], "complete": len(found) <= limit}
