"""The run directory: recipe.yaml, metrics.jsonl, completions.jsonl, eval.jsonl, checkpoints/step-N/,
adapter/."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hetero.errors import CheckpointError
from hetero.recipe.difference import differences
from hetero.recipe.recipe import Recipe
from hetero.run.journal import Journal

_STATE = "state.json"
"""Written last: a checkpoint without it is torn."""


class RunDirectory:
    """One run on disk. Only one process at a time may hold it (an advisory lock, gone with the process).

    The checkpoint of a step is the commit point: the step's journal lines are written before it, and resuming
    drops
    the lines of every later step. So a killed run loses at most the steps since its last checkpoint, and does
    those
    again bit for bit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Journal(path / "metrics.jsonl")
        self.completions = Journal(path / "completions.jsonl")
        self.eval = Journal(path / "eval.jsonl")
        self._lock: IO[str] | None = None

    @classmethod
    def open(cls, path: Path, recipe: Recipe, *, resume: bool) -> RunDirectory:
        """Create the directory, or with `resume` go on in an existing one (a missing one is then simply
        started).

        Raises CheckpointError if it exists without `resume`, is held by another process, or has another
        recipe.
        """
        run = cls(path)
        if path.is_file():
            raise CheckpointError(f"The run directory {path} is a file. Give another --out.")
        if path.is_dir() and any(path.iterdir()) and not resume:
            raise CheckpointError(
                f"The run directory {path} already exists. Go on with it: add --resume. Start anew: give "
                "another --out, "
                f"or delete it (rm -r {path})."
            )
        path.mkdir(parents=True, exist_ok=True)
        run._hold()
        saved = path / "recipe.yaml"
        if saved.exists():
            _same(Recipe.load(saved), recipe, path)
        elif any(entry.name != ".lock" for entry in path.iterdir()):
            run.close()
            raise CheckpointError(
                f"{path} has no recipe.yaml, so it is not a run directory. Give another --out."
            )
        _write_text(saved, recipe.to_yaml())
        (path / "checkpoints").mkdir(exist_ok=True)
        for journal in (run.metrics, run.completions, run.eval):
            journal.rewind(run.last_step())
        return run

    def close(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def last_step(self) -> int:
        """The step of the newest whole checkpoint, 0 if there is none."""
        return max(self._steps(), default=0)

    def checkpoint(self, step: int) -> Path:
        """The directory of the checkpoint after `step`."""
        return self.path / "checkpoints" / f"step-{step}"

    def state(self, step: int) -> dict[str, Any]:
        """The loop's own state in the checkpoint after `step`."""
        loaded: dict[str, Any] = json.loads((self.checkpoint(step) / _STATE).read_text(encoding="utf-8"))
        return loaded

    def save(self, step: int, write: Callable[[Path], object], state: Mapping[str, Any], keep: int) -> None:
        """Write a checkpoint with `write(directory)`, make it visible in one rename, delete all but the
        newest `keep`."""
        final = self.checkpoint(step)
        draft = final.with_name(f".{final.name}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write(draft)
        _write_text(draft / _STATE, json.dumps({"step": step, **state}))
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync(final.parent)
        for old in sorted(self._steps())[:-keep]:
            shutil.rmtree(self.checkpoint(old))

    def _steps(self) -> list[int]:
        found = (self.path / "checkpoints").glob(f"step-*/{_STATE}")
        return [int(path.parent.name.removeprefix("step-")) for path in found]

    def _hold(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointError(
                f"Another process is running in {self.path}. Wait for it, stop it, or give another --out."
            ) from None


def _same(saved: Recipe, given: Recipe, path: Path) -> None:
    found = differences(saved, given)
    if found:
        raise CheckpointError(
            f"{path} was started with another recipe: {'; '.join(found)}. Resume with the saved one "
            f"(hetero rl {path / 'recipe.yaml'} --out {path} --resume), or give another --out. "
            "Only log.*, engine.*, model.threads, how often to save, and more train.steps may change."
        )


def _write_text(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
