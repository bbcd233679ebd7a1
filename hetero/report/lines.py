"""A run as plain lines: for logs, pipes and terminals that can do no more."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.recipe.recipe import Recipe
from hetero.report.numbers import duration, fixed, short, time_parts, visible

Metrics = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


class LineView:
    """Says each thing once, when it is done. `write` takes one line at a time."""

    def __init__(self, recipe: Recipe, write: Callable[[str], None] | None = None) -> None:
        self._recipe = recipe
        self._write = write or _print
        self._messages = Messages(self._write)

    def started(self, recipe: Recipe, out: Path, step: int) -> None:
        self._messages.open()
        self._write(heading(recipe, out, step))

    def phase(self, step: int, name: str) -> None:
        if name == "load":
            self._write("loading the model")

    def progress(self, done: int, total: int) -> None: ...

    def stepped(self, metrics: Metrics, rows: Rows) -> None:
        self._write(step_line(metrics, self._recipe.train.steps))
        for row in chosen(rows, self._recipe.log.samples):
            self._write(f"    {sample_line(row)}")

    def evaluated(self, record: Metrics) -> None:
        self._write(evaluation_line(record))

    def ended(self) -> None:
        self._messages.close()


class Messages(logging.Handler):
    """While open, warnings of the run come out through `write`, so that they do not tear a live view."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._to = write
        self._logger = logging.getLogger("hetero")

    def open(self) -> None:
        self._logger.addHandler(self)
        self._propagated, self._logger.propagate = self._logger.propagate, False

    def close(self) -> None:
        if self in self._logger.handlers:
            self._logger.removeHandler(self)
            self._logger.propagate = self._propagated
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self._to(f"{record.levelname.lower()}: {visible(record.getMessage())}")


def heading(recipe: Recipe, out: Path, step: int) -> str:
    """What is about to happen, in one line."""
    rl, steps = recipe.rl, recipe.train.steps
    going_on = f", going on after step {step}" if step else ""
    return (
        f"{recipe.model.path} -> {out}: {steps} steps of {rl.prompts_per_step} prompts x {rl.group_size} "
        f"answers ({rl.algorithm}){going_on}"
    )


def step_line(metrics: Metrics, steps: int) -> str:
    """A finished step in one line: what was reached, how fast, and where the time went."""
    width = len(str(steps))
    parts = [
        f"step {metrics['step']:>{width}}/{steps}",
        f"reward {fixed(metrics.get('reward'))} ±{fixed(metrics.get('reward_std'), 2)}",
        f"length {short(metrics.get('completions/mean_length'))}",
        f"loss {short(metrics.get('loss'))}",
        f"grad {short(metrics.get('grad_norm'))}",
        f"mismatch {short(metrics.get('mismatch/logp_abs_max'))}",
        f"{short(metrics.get('perf/rollout_tok_s'))} tok/s out",
        f"{short(metrics.get('perf/train_tok_s'))} tok/s train",
        f"{duration(sum(time_parts(metrics).values()))}: {time_shares(metrics)}",
    ]
    masked = metrics.get("data/masked")
    if masked:
        parts.append(f"{masked:g} masked")
    return "  ".join(parts)


def time_shares(metrics: Metrics) -> str:
    """rollout 52% reward 1% train 47%: parts of a hundredth and more."""
    parts = time_parts(metrics)
    whole = sum(parts.values()) or 1.0
    always = ("rollout", "reward", "train")
    shares = ((part, seconds / whole) for part, seconds in parts.items())
    return " ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005 or part in always)


def evaluation_line(record: Metrics) -> str:
    """An evaluation in one line."""
    masked = f", {record['masked']:g} masked" if record.get("masked") else ""
    seconds = f" in {duration(record['time/eval'])}" if record.get("time/eval") else ""
    count = f" of {record['samples']} answers" if record.get("samples") else ""
    return (
        f"eval after step {record['step']}: accuracy {fixed(record.get('accuracy'))}{count}{masked}{seconds}"
    )


def chosen(rows: Rows, count: int) -> list[Mapping[str, Any]]:
    """`count` rows that say most: by turns one of the best and of the worst, of different prompts."""
    scored = [row for row in rows if row.get("reward") is not None]
    best = sorted(scored, key=lambda row: -row["reward"])
    worst = best[::-1]
    found: list[Mapping[str, Any]] = []
    while len(found) < min(count, len(scored)):
        side = worst if len(found) % 2 else best
        prompts = {row.get("serial") for row in found}
        left = [row for row in side if not any(row is other for other in found)]
        found.append(next((row for row in left if row.get("serial") not in prompts), left[0]))
    return found


def sample_line(row: Mapping[str, Any], longest: int = 60) -> str:
    """A completion in one line."""
    said = visible(row.get("completion", ""), longest) or "(nothing)"
    return f"{fixed(row['reward'], 2):>5}  {visible(row.get('prompt', ''), longest)}  ->  {said}"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
