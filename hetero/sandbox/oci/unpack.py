"""Unpacks one layer's tar stream as an overlay layer. Nothing in it is trusted.

Every name is opened relative to the layer's directory by the kernel's RESOLVE_IN_ROOT, so no link and no ".."
leads out. Left out are devices and extended attributes (file capabilities, overlay's own marks); setuid and
setgid bits are dropped, and everything belongs to the boxes' user. Deletions (".wh.NAME") become overlay's
character devices 0:0, and opaque directories its attribute.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero.sandbox.errors import ImageError
from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import tree
from hetero.sandbox.oci.limits import ImageLimits, Readable
from hetero.sandbox.store import give

_OPAQUE = "user.overlay.opaque"
_LONGEST_HEADER = 1 << 20
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class _Member(tarfile.TarInfo):
    """A member whose extended headers are not read into memory without bound."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED and self.size > _LONGEST_HEADER:
            raise ImageError(f"A layer has an extended header of {self.size} bytes.")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found


class Layer:
    """A layer that is being unpacked into the empty directory `target`."""

    def __init__(self, target: Path, limits: ImageLimits, num_entries: int) -> None:
        self._target, self._limits = target, limits
        self.num_entries = num_entries
        self._root = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._directories: list[tuple[str, int, float]] = []

    def unpack(self, stream: Readable) -> None:
        """Unpack all. Raises ImageError."""
        try:
            source: Any = stream
            with tarfile.open(fileobj=source, mode="r|", tarinfo=_Member, errorlevel=1) as archive:
                for member in archive:
                    self._take(archive, member)
            for name, mode, time in reversed(self._directories):
                self._finish_directory(name, mode, time)
        except ImageError:
            raise
        except (tarfile.TarError, OSError, ValueError, OverflowError, EOFError) as error:
            raise ImageError(f"A layer cannot be unpacked: {error}.") from error
        finally:
            os.close(self._root)

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.num_entries += 1
        if self.num_entries > self._limits.entries:
            raise ImageError(
                f"The image has more than {self._limits.entries} entries.",
                "Raise ImageLimits.entries if that is right.",
            )
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if member.name.startswith("/") or ".." in parts or "\0" in member.name:
            raise ImageError(f"A layer names {member.name!r}: names are relative and without '..'.")
        if not parts:
            return
        with self._parent(parts[:-1]) as (directory, path):
            name = parts[-1]
            if name.startswith(".wh."):
                self._delete(directory, name[len(".wh.") :], path)
            else:
                self._make(archive, member, directory, name, "/".join((path, name)))

    @contextlib.contextmanager
    def _parent(self, parts: list[str]) -> Iterator[tuple[int, str]]:
        """(descriptor, name) of a directory of the layer; what is missing on the way is made."""
        handle = self._open("/".join(parts) or ".")
        if handle is None:
            for depth in range(1, len(parts) + 1):
                here = "/".join(parts[:depth])
                if self._open(here, close=True) is None:
                    with self._parent(parts[: depth - 1]) as (above, _):
                        self._new_directory(above, parts[depth - 1])
            handle = self._open("/".join(parts))
        if handle is None:
            raise ImageError(
                f"A layer puts something below {'/'.join(parts)!r}, which is no directory in it."
            )
        try:
            yield handle, "/".join(parts)
        finally:
            os.close(handle)

    def _open(self, path: str, close: bool = False) -> int | None:
        flags, resolve = os.O_RDONLY | os.O_DIRECTORY, k.RESOLVE_IN_ROOT | k.RESOLVE_NO_MAGICLINKS
        try:
            handle = k.openat2(self._root, path, flags, 0, resolve)
        except OSError:
            return None
        if close:
            os.close(handle)
        return handle

    def _new_directory(self, above: int, name: str) -> None:
        """Make it, or leave what is there: a link to nothing, or a file, which opening it will tell."""
        replaced = self._is_deletion(above, name)
        if replaced:
            os.unlink(name, dir_fd=above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=above)
            self._own(above, name)
            if replaced:
                self._set_opaque(above, name)

    def _make(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, above: int, name: str, path: str
    ) -> None:
        if member.isdir():
            if not stat.S_ISDIR(self._mode(above, name) or 0):
                if not self._is_deletion(above, name):
                    self._clear(above, name)
                self._new_directory(above, name)
            self._directories.append((path, member.mode, float(member.mtime)))
            return
        if member.islnk():
            self._link(member, above, name)
            return
        if not (member.isreg() or member.issym() or member.isfifo()):
            return  # a device
        self._clear(above, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=above)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=above)
        else:
            self._write(archive, member, above, name)
        self._own(above, name)
        if not member.issym():
            os.chmod(name, stat.S_IMODE(member.mode) & 0o1777, dir_fd=above)
        times = (float(member.mtime), float(member.mtime))
        os.utime(name, times, dir_fd=above, follow_symlinks=False)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, above: int, name: str) -> None:
        if member.size > self._limits.bytes:
            raise ImageError(f"{member.name} is larger than {self._limits.bytes} bytes, the image's limit.")
        source = archive.extractfile(member)
        assert source is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=above), "wb") as file:
            while data := source.read(1 << 20):
                file.write(data)

    def _link(self, member: tarfile.TarInfo, above: int, name: str) -> None:
        parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
        folder = None if not parts or ".." in parts else self._open("/".join(parts[:-1]) or ".")
        if folder is None:
            raise ImageError(
                f"{member.name} is a hard link to {member.linkname!r}, which is not in the layer."
            )
        try:
            mode = self._mode(folder, parts[-1])
            if mode is None or stat.S_ISDIR(mode) or self._is_deletion(folder, parts[-1]):
                raise ImageError(f"{member.name} is a hard link to {member.linkname!r}, which is no file.")
            same = (os.fstat(folder).st_ino, parts[-1]) == (os.fstat(above).st_ino, name)
            if not same:
                self._clear(above, name)
                os.link(parts[-1], name, src_dir_fd=folder, dst_dir_fd=above, follow_symlinks=False)
        finally:
            os.close(folder)

    def _delete(self, above: int, name: str, path: str) -> None:
        """Hide what older layers have; what this layer itself has at the place stays."""
        if name == ".wh..opq":
            if path:
                os.setxattr(above, _OPAQUE, b"y")
            else:
                raise ImageError("A layer deletes the whole root.")
        elif name.startswith(".wh."):
            return  # another file system's own marks
        elif name in ("", ".", ".."):
            raise ImageError(f"A layer deletes {name!r}.")
        elif (mode := self._mode(above, name)) is None:
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=above)
            self._own(above, name)
        elif stat.S_ISDIR(mode):
            self._set_opaque(above, name)

    def _mode(self, above: int, name: str) -> int | None:
        try:
            return os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None

    def _is_deletion(self, above: int, name: str) -> bool:
        return stat.S_ISCHR(self._mode(above, name) or 0)

    def _clear(self, above: int, name: str) -> None:
        if self._mode(above, name) is not None:
            tree.remove(f"/proc/self/fd/{above}/{name}")

    def _own(self, above: int, name: str) -> None:
        give(f"/proc/self/fd/{above}/{name}")

    def _set_opaque(self, above: int, name: str) -> None:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            os.setxattr(handle, _OPAQUE, b"y")
        finally:
            os.close(handle)

    def _finish_directory(self, path: str, mode: int, time: float) -> None:
        """Its mode and time, once nothing more is put into it; its owner always keeps the way in."""
        handle = self._open(path)
        if handle is not None:
            os.chmod(handle, stat.S_IMODE(mode) & 0o1777 | 0o700)
            os.utime(handle, (time, time))
            os.close(handle)
