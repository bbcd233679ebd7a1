"""File operations below a root, done as the box's user without capabilities.

The root is that of the box's own mount namespace, or the directory that holds a copied tree. Whatever a path
leads to, it leads to below it. Nothing but regular files is read, nothing blocks, and
sizes are capped.
"""

from __future__ import annotations

import os
import stat

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire
from hetero.sandbox.launcher.box import ENTERED, become
from hetero.sandbox.launcher.layers import changes, copy_layer, open_upper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def serve_files(request: dict[str, Any], channel: int, box: tuple[int, int]) -> None:
    """Do the operation that `request` names and send the result."""
    operation = OPERATIONS[request["op"]]
    try:
        if request["op"] in ("changes", "copy"):
            request["upper"] = f"/proc/self/fd/{open_upper(box[0])}"
            k.setns(box[1], k.CLONE_NEWUSER)
            become(request["uid"])
        elif "files" not in request["weaken"]:
            k.setns(box[1], ENTERED & ~(k.CLONE_NEWNET if "network" in request["weaken"] else 0))
            become(request["uid"])
            k.drop_capabilities()
            os.umask(0o022)
        request["root"] = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        reply: dict[str, Any] = {"ok": operation(request)}
    except OSError as error:
        reply = {"error": error.strerror or str(error), "errno": error.errno or 5}
    wire.send(channel, reply)


def _open(request: dict[str, Any], path: str, flags: int) -> int:
    if not flags & os.O_PATH:
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    return k.openat2(request["root"], path, flags, 0, k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS)


def _read(request: dict[str, Any]) -> dict[str, Any]:
    if "files" in request["weaken"]:
        with open(request["host_path"], "rb") as file:
            return {"data": file.read(), "size": 0}
    handle = _open(request, request["path"], os.O_RDONLY)
    found = os.fstat(handle)
    if stat.S_ISDIR(found.st_mode):
        raise OSError(21, "Is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "Not a regular file")
    parts, left = [], request["max_bytes"]
    os.lseek(handle, request["offset"], os.SEEK_SET)
    while left > 0 and (part := os.read(handle, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return {"data": b"".join(parts), "size": found.st_size}


def _write(request: dict[str, Any]) -> dict[str, Any]:
    """All or nothing: a temporary file beside the target, then a rename; links in the last place are
    replaced."""
    folder, name = os.path.split(request["path"])
    if not name or name in (".", ".."):
        raise OSError(21, "Is a directory")
    directory = _made(request, folder or "/")
    _need_writable(request, directory, name)
    temporary = f".{name[:200]}.{os.urandom(6).hex()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        target = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(target.st_mode):
            raise OSError(21, "Is a directory")
    except FileNotFoundError:
        pass
    handle = k.openat2(
        directory, temporary, flags, request["mode"], k.RESOLVE_BENEATH | k.RESOLVE_NO_SYMLINKS
    )
    try:
        view = memoryview(request["data"])
        while view:
            view = view[os.write(handle, view) :]
        os.fchmod(handle, request["mode"])
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise
    return {}


def _made(request: dict[str, Any], folder: str) -> int:
    """A descriptor of a directory; what is missing on the way is made."""
    try:
        return _open(request, folder, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        above, name = os.path.split(folder.rstrip("/"))
        parent = _made(request, above or "/")
        _need_writable(request, parent, name)
        try:  # noqa: SIM105 (contextlib is large)
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:  # made by the box at the same time, or a link to nothing: opening it tells
            pass
        return _open(request, folder, os.O_PATH | os.O_DIRECTORY)


def _need_writable(request: dict[str, Any], directory: int, name: str) -> None:
    """Raise OSError for a name that no mount keeps from being written: `fence` holds the tree's path, what
    may be written in it, and what may not within that."""
    if "fence" in request:
        tree, writable, protected = request["fence"]
        place = os.path.join(os.readlink(f"/proc/self/fd/{directory}").removeprefix(tree), name) + "/"
        if not any(place.startswith(path.rstrip("/") + "/") for path in writable) or any(
            place.startswith(path.rstrip("/") + "/") for path in protected
        ):
            raise OSError(30, "Read-only file system")


def _list(request: dict[str, Any]) -> dict[str, Any]:
    handle = _open(request, request["path"], os.O_RDONLY | os.O_DIRECTORY)
    entries: list[tuple[str, str, int, int]] = []
    left = request["max_entries"]
    with os.scandir(handle) as found:
        for entry in found:
            if left == 0:
                return {"entries": entries, "complete": False}
            left -= 1
            status = entry.stat(follow_symlinks=False)
            entries.append((entry.name, _kind(status.st_mode), status.st_size, status.st_mode & 0o7777))
    return {"entries": sorted(entries), "complete": True}


def _kind(mode: int) -> str:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "other")


OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "read": _read,
    "write": _write,
    "list": _list,
    "changes": changes,
    "copy": copy_layer,
}
