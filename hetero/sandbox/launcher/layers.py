"""Reads overlay layers: what changed, and copies of them. Whiteouts are character devices 0:0."""

from __future__ import annotations

import os
import stat

from hetero.sandbox.launcher.box import UPPER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLOCK_STEP_NS = 12_000_000
"""Time stamps of files lag behind the clock by up to a tick, and a tick may be 10 ms."""


def open_upper(first: int) -> int:
    """The upper layer of the box with that first process; before joining its namespaces."""
    try:
        return os.open(f"/proc/{first}/fd/{UPPER}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OSError(3, "the box is gone") from None
    except PermissionError:  # so says the kernel of a process that has ended, to all but root
        with open(f"/proc/{first}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                raise OSError(3, "the box is gone") from None
        raise


def changed_since(upper: int, begun_ns: int, limit: int) -> dict[str, Any]:
    """Entries of the upper layer whose status changed since then: a time that the box cannot set."""
    found: list[str] = []
    total = 0
    pending = [("", os.dup(upper))]
    while pending:
        below, handle = pending.pop()
        try:
            with os.scandir(handle) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                        directory = stat.S_ISDIR(status.st_mode)
                        path = f"{below}/{entry.name}"
                        if status.st_ctime_ns >= begun_ns - _CLOCK_STEP_NS:
                            total += 1
                            if len(found) < limit:
                                found.append(path + "/" * directory)
                        if directory:
                            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                            pending.append((path, os.open(entry.name, flags, dir_fd=handle)))
                    except OSError:
                        continue
        finally:
            os.close(handle)
    return {"count": total, "paths": sorted(found)}


def changes(request: dict[str, Any]) -> dict[str, Any]:
    """Differences of the upper layer from the layers below, with the box's own rights on its directories."""
    found: list[tuple[str, str]] = []
    limit = request["max_entries"]
    pending = [""]
    while pending and len(found) < limit:
        below = pending.pop()
        with os.scandir(os.path.join(request["upper"], below)) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                path = os.path.join(below, entry.name)
                mode = entry.stat(follow_symlinks=False).st_mode
                before = lower_mode(request["layers"], path)
                if is_whiteout(entry):
                    if before is not None:
                        found.append(("D", path))
                    continue
                directory = stat.S_ISDIR(mode)
                if before is None:
                    found.append(("A", path + "/" * directory))
                elif not (directory and stat.S_ISDIR(before)):
                    found.append(("M", path + "/" * directory))
                if directory:
                    pending.append(path)
                    if before is not None and is_opaque(entry.path):
                        found.append(("M", path + "/"))
    return {"changes": sorted(found, key=lambda pair: pair[1])[:limit], "complete": not pending}


def is_whiteout(entry: os.DirEntry[str]) -> bool:
    """Whether this entry of a layer stands for a deletion."""
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(path: str) -> bool:
    """Whether this directory of a layer hides what older layers have at its place."""
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def lower_mode(layers: list[str], path: str) -> int | None:
    """Mode of `path` in the stack of `layers` (newest first); None where there is nothing."""
    parts = path.split("/")
    for layer in layers:
        here, hidden = layer, False
        for depth, part in enumerate(parts, 1):
            here = os.path.join(here, part)
            try:
                status = os.lstat(here)
            except OSError:
                break
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                return None
            if depth == len(parts):
                return status.st_mode
            if not stat.S_ISDIR(status.st_mode):
                return None
            hidden = hidden or is_opaque(here)
        if hidden:
            return None
    return None


def copy_layer(request: dict[str, Any]) -> dict[str, Any]:
    """Copy the upper layer to the empty directory `target`, whiteouts, opaque marks, modes and times
    included."""
    num_bytes = _copy_directory(request["upper"] + "/.", request["target"])
    return {"bytes": num_bytes}


def _copy_directory(source: str, target: str) -> int:
    num_bytes = 0
    with os.scandir(source) as entries:
        for entry in entries:
            made = os.path.join(target, entry.name)
            status = entry.stat(follow_symlinks=False)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), made)
                os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
                continue
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(made, 0o700)
                num_bytes += _copy_directory(entry.path, made)
            elif entry.is_file(follow_symlinks=False):
                num_bytes += _copy_file(entry.path, made)
            elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                os.mknod(made, stat.S_IFCHR, 0)
                continue
            elif stat.S_ISFIFO(status.st_mode):
                os.mkfifo(made)
            else:
                continue  # a socket: nobody will listen on the copy
            for name in os.listxattr(entry.path, follow_symlinks=False):
                if name.startswith("user."):
                    os.setxattr(made, name, os.getxattr(entry.path, name))
            os.chmod(made, stat.S_IMODE(status.st_mode))
            os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
    return num_bytes


def _copy_file(source: str, target: str) -> int:
    reader = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        total = 0
        while sent := os.sendfile(writer, reader, total, 1 << 24):
            total += sent
        return total
    finally:
        os.close(reader)
        os.close(writer)
