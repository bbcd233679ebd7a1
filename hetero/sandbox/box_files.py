"""Files of a box, read and written from outside without trusting a single path in it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from hetero.errors import ArgumentError
from hetero.sandbox.box_state import BoxState
from hetero.sandbox.errors import DiskLimit, PolicyDenied, SandboxDead, SandboxInfraError
from hetero.sandbox.image import skeleton
from hetero.sandbox.journal import decide
from hetero.sandbox.policy import Event

LARGEST_READ = 16 << 20
MOST_ENTRIES = 100_000


@dataclass(frozen=True)
class Entry:
    """One name in a directory. `kind`: "file", "directory", "link" or "other"; `size` in bytes."""

    name: str
    kind: str
    size: int
    mode: int


@dataclass(frozen=True, order=True)
class Change:
    """A difference from the layers below. `kind`: "A" added, "M" modified, "D" deleted; directories end in
    "/"."""

    path: str
    kind: str


class BoxFiles(BoxState):
    """The part of Sandbox that deals with files. Paths are absolute, or below /workspace.

    Errors are those of `open`: FileNotFoundError, IsADirectoryError, PermissionError and so on. A path that
    leads to a FIFO, a device or a socket raises OSError; nothing blocks.
    """

    def read_file(self, path: str, max_bytes: int = LARGEST_READ, offset: int = 0) -> bytes:
        """At most `max_bytes` from `offset` on. Links are followed inside the box only."""
        request = {"op": "read", "path": _absolute(path), "max_bytes": max_bytes, "offset": offset}
        if "files" in self._weaken:
            request["host_path"] = self._host_path(path)
        data = self._file_work(request, path)["data"]
        self._log("read", path=_absolute(path), bytes=len(data))
        return bytes(data)

    def write_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a whole file, or nothing. Missing directories are made; a link in its place is replaced.

        Raises PolicyDenied for what is not writable, DiskLimit when there is no room.
        """
        content = data.encode() if isinstance(data, str) else bytes(data)
        where = _absolute(path)
        decide(self.policy, Event("write", self.id, {"path": where, "size": len(content)}), self._log)
        self._file_work({"op": "write", "path": where, "data": content, "mode": mode}, path)
        self._log("write", path=where, bytes=len(content))

    def list_dir(self, path: str = "/workspace") -> list[Entry]:
        """Entries of a directory, by name. Raises SandboxInfraError for more than 100 000."""
        reply = self._file_work({"op": "list", "path": _absolute(path), "max_entries": MOST_ENTRIES}, path)
        if not reply["complete"]:
            raise SandboxInfraError(f"{path} has more than {MOST_ENTRIES} entries.")
        return [Entry(*entry) for entry in reply["entries"]]

    def changes(self) -> list[Change]:
        """What differs from the box's layers: from its image, its snapshot or its last own snapshot."""
        policy = self.policy
        lowest = skeleton(
            self._shared.launcher.run, self.image, (*policy.writable, *policy.readable), policy.uid
        )
        request = {"op": "changes", "layers": [*self._layers, lowest], "max_entries": MOST_ENTRIES}
        reply = self._file_work(request, "")
        if not reply["complete"]:
            raise SandboxInfraError(f"More than {MOST_ENTRIES} files were changed.")
        return [Change("/" + path, kind) for kind, path in reply["changes"]]

    def _file_work(self, request: dict[str, Any], path: str) -> Any:
        with self._lock:
            self._need("live", "frozen")
        request |= {"uid": self.policy.uid, "weaken": list(self._weaken)}
        reply = self._work(request)
        if "error" not in reply:
            return reply["ok"]
        number = reply["errno"]
        if number == errno.ESRCH:
            raise SandboxDead(f"Sandbox {self.id} is gone: its processes have ended.")
        if "what" in reply:
            raise SandboxInfraError(f"Files of sandbox {self.id} cannot be reached: {reply['error']}.")
        if number == errno.EROFS or (number in (errno.EACCES, errno.EPERM) and request["op"] == "write"):
            raise PolicyDenied(
                f"{path} is not writable in this box.", "Add its directory to Policy.writable."
            )
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise DiskLimit(
                f"There is no room for {path} in this box.", "Raise Limits.disk_mb or Limits.inodes."
            )
        raise OSError(number, reply["error"], path)

    def _host_path(self, path: str) -> str:
        """Where a naive harness would look: for the test that shows why ours does not."""
        return f"{self._directory}/u{_absolute(path)}"


def _absolute(path: str) -> str:
    if "\0" in path or not path:
        raise ArgumentError(f"{path!r} is no path.")
    return path if path.startswith("/") else f"/workspace/{path}"
