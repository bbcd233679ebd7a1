"""Removes a directory tree whatever modes its directories have (overlayfs leaves some with none)."""

from __future__ import annotations

import os
import stat


def remove(path: str) -> None:
    """Remove `path` and all below it; links are removed, not followed. What is not there is not missed."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(path)
        return
    if status.st_mode & 0o700 != 0o700:
        os.chmod(path, 0o700)
    pending: list[tuple[str, bool]] = [(path, False)]
    while pending:
        here, emptied = pending.pop()
        if emptied:
            os.rmdir(here)
            continue
        pending.append((here, True))
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.stat(follow_symlinks=False).st_mode & 0o700 != 0o700:
                        os.chmod(entry.path, 0o700)
                    pending.append((entry.path, False))
                else:
                    os.unlink(entry.path)
