"""The run directory: recipe.yaml, metrics.jsonl, completions.jsonl, eval.jsonl, checkpoints/step-N/,
adapter/."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hetero.errors import CheckpointError
from hetero.recipe.difference import differences
from hetero.recipe.recipe import Recipe
from hetero.run.journal import Journal
from hetero.train.checkpoint import latest_checkpoint, prune_checkpoints, storing, write_checkpoint

_STATE = "loop.json"


class RunDirectory:
    """One run on disk. Only one process at a time may hold it (an advisory lock, gone with the process).

    The checkpoint of a step is the commit point: the step's journal lines are written before it, and resuming
    drops the lines of every later step. So a killed run loses at most the steps since its last checkpoint,
    and does those again bit for bit.

    Attributes:
        path: the directory. metrics, completions, eval: its journals.
        saved: step of the newest whole checkpoint, 0 if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Journal(path / "metrics.jsonl")
        self.completions = Journal(path / "completions.jsonl")
        self.eval = Journal(path / "eval.jsonl")
        self.saved = 0
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
        with storing(path):
            path.mkdir(parents=True, exist_ok=True)
            inside = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
        if inside and "recipe.yaml" not in inside:
            raise CheckpointError(
                f"{path} has no recipe.yaml, so it is no run directory. Give another --out."
            )
        if inside and not resume:
            raise CheckpointError(
                f"The run directory {path} already exists. Go on with it: add --resume. Start anew: give "
                f"another --out, or delete it (rm -r {shlex.quote(str(path))})."
            )
        try:
            with storing(path):
                run._hold()
                run._begin(recipe)
        except BaseException:
            run.close()
            raise
        return run

    def _begin(self, recipe: Recipe) -> None:
        saved = self.path / "recipe.yaml"
        if saved.exists():
            _same(Recipe.load(saved), recipe, self.path)
        _write_text(saved, recipe.to_yaml())
        (self.path / "checkpoints").mkdir(exist_ok=True)
        newest = latest_checkpoint(self.path / "checkpoints")
        self.saved = 0 if newest is None else int(newest.name.removeprefix("step-"))
        for journal in (self.metrics, self.completions, self.eval):
            journal.rewind(self.saved)

    def close(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def checkpoint(self, step: int) -> Path:
        """The directory of the checkpoint after `step`."""
        return self.path / "checkpoints" / f"step-{step}"

    def trainer(self, step: int) -> Path:
        """The trainer's part of the checkpoint after `step`."""
        return self.checkpoint(step) / "trainer"

    def state(self, step: int) -> dict[str, Any]:
        """The loop's own state in the checkpoint after `step`."""
        loaded: dict[str, Any] = json.loads((self.checkpoint(step) / _STATE).read_text(encoding="utf-8"))
        return loaded

    def save(
        self, step: int, save_trainer: Callable[[Path], object], state: Mapping[str, Any], *, keep: int
    ) -> None:
        """Make the checkpoint after `step`: the trainer's part and the loop's `state`. The newest `keep`
        stay."""

        def write(directory: Path) -> None:
            save_trainer(directory / "trainer")
            (directory / _STATE).write_text(json.dumps({"step": step, **state}), encoding="utf-8")

        write_checkpoint(self.checkpoint(step), write)
        with storing(self.path):
            prune_checkpoints(self.path / "checkpoints", keep)
        self.saved = step

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
        resume = shlex.join(["hetero", "rl", str(path / "recipe.yaml"), "--out", str(path), "--resume"])
        raise CheckpointError(
            f"{path} was started with another recipe: {'; '.join(found)}. Resume with the saved one "
            f"({resume}), or give another --out. "
            "Only log.*, engine.*, model.threads, how often to save, and more train.steps may change."
        )


def _write_text(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
