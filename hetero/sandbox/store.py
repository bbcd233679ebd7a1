"""Where boxes and layers lie on disk, whose they are, and how leftovers are found.

Every owner (a process) has a run directory with a lock that it and its launcher hold; when both are gone,
anyone may sweep it away. `HETERO_STORE` moves the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from hetero.sandbox.errors import SandboxInfraError
from hetero.sandbox.launcher import brand, tree

OUTER_ID = 64_999
"""Host user and group of boxes when their owner is root."""


def store_root() -> Path:
    """HETERO_STORE; else /var/lib/hetero/sandbox for root, the user's cache otherwise."""
    named = os.environ.get("HETERO_STORE")
    if named:
        return Path(named).expanduser().absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/hetero/sandbox")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "hetero" / "sandbox"


def outer_ids() -> tuple[int, int]:
    """(uid, gid) on the host of everything in boxes."""
    if os.geteuid() != 0 or not _is_mapped(OUTER_ID):
        return os.geteuid(), os.getegid()
    return OUTER_ID, OUTER_ID


def _is_mapped(uid: int) -> bool:
    """Whether this user namespace has that user: root of a small container may be alone."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [[int(field) for field in row.split()] for row in file]
    return any(start <= uid < start + count for start, _, count in ranges)


def private_directory(path: Path) -> Path:
    """Make a directory of the boxes' user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    give(path)
    return path


def give(path: Path | str) -> None:
    """Make the boxes' user the owner, if the caller is root."""
    if outer_ids()[0] != os.geteuid():
        os.chown(path, *outer_ids(), follow_symlinks=False)


@dataclass
class Run:
    """The directory of one owner.

    Attributes:
        path: holds boxes/, layers/, skeletons/.
        lock: descriptor that holds the lock; the launcher inherits it.
    """

    path: Path
    lock: int

    def new_directory(self, kind: str, name: str) -> Path:
        """A new directory `kind`/`name`."""
        path = self.path / kind / name
        path.mkdir(mode=0o700)
        give(path)
        return path


def open_run() -> Run:
    """A new run directory. Leftovers of owners that are gone are swept first."""
    root = store_root()
    try:
        runs = root / "runs"
        runs.mkdir(mode=0o755, parents=True, exist_ok=True)
        sweep()
        path = runs / f"{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = path.with_name(path.name + ".new")  # no sweeper sees the lock before it is held
        lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(path.with_name(path.name + ".lock"))
        private_directory(path)
        for kind in ("boxes", "layers", "skeletons"):
            private_directory(path / kind)
    except OSError as error:
        raise SandboxInfraError(
            f"The sandbox store {root} cannot be used: {error}.",
            "Set HETERO_STORE to a directory on a local disk.",
        ) from error
    return Run(path, lock)


def sweep() -> list[str]:
    """Remove the run directories that nobody holds; their names."""
    removed = []
    runs = store_root() / "runs"
    for lock_path in sorted(runs.glob("*.lock")) if runs.is_dir() else []:
        try:
            handle = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = lock_path.with_suffix("")
            brand.end_below(str(path))
            tree.remove(str(path))
            _remove_groups(path.name)
            lock_path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass
        except OSError:
            continue  # being removed by another sweeper, or some process does not end: the next sweep tries
        finally:
            os.close(handle)
    return removed


def _remove_groups(name: str) -> None:
    """Control groups of a launcher that was killed; the last of its boxes' processes may be about to end."""
    for pattern in (f"hetero-{name}", f"*/hetero-{name}"):
        for parent in Path("/sys/fs/cgroup").glob(pattern):
            until = time.monotonic() + 1
            while parent.exists() and time.monotonic() < until:
                for group in (*parent.glob("*/"), parent):
                    with contextlib.suppress(OSError):
                        group.rmdir()


def close_run(run: Run) -> None:
    """Give the directory up."""
    os.close(run.lock)
    sweep()
