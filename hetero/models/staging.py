"""Directories that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero.errors import ModelError


@contextmanager
def staged_directory(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Fill a temporary directory beside `target` and rename it to `target` at the end.

    Args:
        target: must not exist or be empty, unless `replace`.
        replace: swap an existing `target` for the new one; it is only removed after the new one is in place.

    Raises:
        ModelError: `target` exists and holds something.
    """
    if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} already exists and is not empty; remove it or choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield staging
        _settle(staging)
        if target.exists():
            retired = staging.with_suffix(".retired")
            target.rename(retired)
            staging.rename(target)
            shutil.rmtree(retired)
        else:
            staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Delete what interrupted attempts at `target` left. The caller holds a lock: no attempt is under way."""
    for pattern in (f".{target.name}.*.partial", f".{target.name}.*.retired"):
        for path in target.parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _settle(directory: Path) -> None:
    """Usual permissions, and force to disk: a crash after the rename must not leave empty files behind."""
    umask = os.umask(0)
    os.umask(umask)
    directory.chmod(0o777 & ~umask)
    for path in directory.iterdir():
        path.chmod(0o666 & ~umask)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
