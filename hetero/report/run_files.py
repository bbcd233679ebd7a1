"""Reads a run directory for people: whatever is there, however the run ended."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hetero.errors import CheckpointError

Record = dict[str, Any]


@dataclass
class Run:
    """The files of a run.

    Attributes:
        path: its directory.
        recipe_text, recipe: recipe.yaml as it stands, and what it says ({} if it cannot be read).
        metrics, evaluations, completions: lines of metrics.jsonl, eval.jsonl, completions.jsonl.
        num_bad_lines: lines that could not be read.
    """

    path: Path
    recipe_text: str = ""
    recipe: Record = field(default_factory=dict)
    metrics: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    completions: list[Record] = field(default_factory=list)
    num_bad_lines: int = 0

    def setting(self, path: str, default: Any = None) -> Any:
        """A key of the recipe, such as `rl.group_size`."""
        node: Any = self.recipe
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return default if node is None else node

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric, where it has a finite value."""
        return points(self.metrics, name)


def read_run(directory: str | Path) -> Run:
    """Read what there is. Raises CheckpointError when the directory is not one of a run."""
    path = Path(directory)
    if not (path / "recipe.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        what = "has neither recipe.yaml nor metrics.jsonl" if path.is_dir() else "is not a directory"
        raise CheckpointError(
            f"{path} {what}, so there is no run to report on. Give the --out of `hetero rl`."
        )
    run = Run(path)
    if (path / "recipe.yaml").is_file():
        run.recipe_text = (path / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
        run.recipe = _recipe(run.recipe_text)
    run.metrics = _lines(run, "metrics.jsonl")
    run.evaluations = _lines(run, "eval.jsonl")
    run.completions = _lines(run, "completions.jsonl")
    return run


def points(records: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """(step, value) of one key, where it has a finite value."""
    found = []
    for record in records:
        value = record.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            found.append((float(record["step"]), float(value)))
    return found


def _recipe(text: str) -> Record:
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _lines(run: Run, name: str) -> list[Record]:
    """The objects with a step in a file, in order of their steps; others are counted."""
    file = run.path / name
    if not file.is_file():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            run.num_bad_lines += 1
    return sorted(records, key=lambda record: int(record["step"]))
