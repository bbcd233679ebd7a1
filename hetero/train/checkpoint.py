"""Directories that are either whole or not there: written aside, synced, then renamed; checked by hash when
read.

A checkpoint `step-N` holds any files plus `manifest.json` with the size and SHA-256 of each. Killing the
process at any moment leaves the previous checkpoints untouched and at most a hidden `.step-N.*` directory,
which the next save sweeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from hetero.errors import CheckpointError
from hetero.models.tensor_file import file_sha256

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")


@contextlib.contextmanager
def storing(place: str | Path) -> Iterator[None]:
    """Turn what a file system or safetensors says about `place` into a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{place} cannot be written: {error}. Make room there, or the directory writable, and resume; or "
            "choose another place."
        ) from error


def write_checkpoint(directory: str | Path, write: Callable[[Path], None]) -> Path:
    """Make `directory` hold exactly what `write` puts into the empty directory it is given, atomically.

    An existing checkpoint of that name is replaced. Nothing is visible under `directory` before everything
    is on disk. Raises CheckpointError when it cannot be written, on a full disk for one; nothing is left
    behind then.
    """
    target = Path(directory)
    staging = target.parent / f".{target.name}.writing"
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        staging.mkdir()
        try:
            write(staging)
            _commit(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return target


def _commit(staging: Path, target: Path) -> None:
    """Make what is in `staging` durable, then visible as `target`."""
    files = {str(path.relative_to(staging)): _fingerprint(path) for path in _files(staging)}
    (staging / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1))
    for path in [*_files(staging), *(p for p in staging.rglob("*") if p.is_dir()), staging]:
        _sync(path)
    if target.exists():
        target.rename(target.parent / f".{target.name}.replaced")
    staging.rename(target)
    _sync(target.parent)
    _sweep(target)


def verify_checkpoint(directory: str | Path) -> Path:
    """Check every file against the manifest. Raises CheckpointError naming the first bad one."""
    target = Path(directory)
    _recover(target)
    if not target.is_dir():
        raise CheckpointError(f"there is no checkpoint at {target}")
    try:
        files = json.loads((target / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{target} has no readable {MANIFEST} ({error}); resume from another checkpoint"
        ) from error
    for name, expected in files.items():
        path = target / name
        if not path.is_file() or _fingerprint(path) != expected:
            state = "is damaged" if path.is_file() else "is missing"
            raise CheckpointError(f"{path} {state}; remove {target} and resume from the checkpoint before it")
    return target


def checkpoints(parent: str | Path) -> list[Path]:
    """The `step-N` directories in `parent`, oldest first, unverified."""
    root = Path(parent)
    if not root.is_dir():
        return []
    for replaced in root.glob(".step-*.replaced"):
        _recover(root / replaced.name.removeprefix(".").removesuffix(".replaced"))
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(parent: str | Path) -> Path | None:
    """The newest checkpoint that verifies, or None. A damaged one is passed over with a warning."""
    for path in reversed(checkpoints(parent)):
        try:
            return verify_checkpoint(path)
        except CheckpointError as error:
            warnings.warn(f"passing over a checkpoint: {error}", stacklevel=2)
    return None


def prune_checkpoints(parent: str | Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` (>= 1) checkpoints."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; expected at least 1")
    for path in checkpoints(parent)[:-keep_last]:
        doomed = path.parent / f".{path.name}.removing"
        path.rename(doomed)
        shutil.rmtree(doomed)


def _recover(target: Path) -> None:
    """Put back a checkpoint whose replacement was killed between the two renames."""
    replaced = target.parent / f".{target.name}.replaced"
    if replaced.is_dir() and not target.exists():
        replaced.rename(target)


def _sweep(target: Path) -> None:
    """Remove what killed saves and prunes of this checkpoint and of its siblings left behind."""
    _recover(target)
    checkpoints(target.parent)
    for name in (target.name, "step-*"):
        for suffix in ("writing", "removing", "replaced"):
            for path in target.parent.glob(f".{name}.{suffix}"):
                shutil.rmtree(path)


def _files(root: Path) -> Iterator[Path]:
    return iter(sorted(path for path in root.rglob("*") if path.is_file()))


def _fingerprint(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _sync(path: Path) -> None:
    """fsync a file or directory; a file system that cannot sync directories is left to its own order."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
