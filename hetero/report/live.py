"""The live view: what a run does, in a terminal while it does it; plain lines where there is none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hetero.recipe.recipe import Recipe
from hetero.report.lines import LineView, Messages, Metrics, Rows, chosen, evaluation_line, heading, step_line
from hetero.report.numbers import duration
from hetero.report.panel import bar, panel

_NAMES = {
    "load": "loading the model",
    "rollout": "writing answers",
    "reward": "scoring answers",
    "train": "learning",
    "save": "saving",
    "eval": "evaluating",
}


def live_view(recipe: Recipe, console: Console | None = None) -> LineView | LiveView:
    """A view of a run: live in a terminal, plain lines otherwise."""
    screen = console or Console()
    if screen.is_terminal and not screen.is_dumb_terminal:
        return LiveView(recipe, screen)
    return LineView(recipe)


class LiveView:
    """A panel at the bottom of the terminal that redraws itself; finished steps stay above it as lines."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        self._recipe = recipe
        self._console = console
        self._messages = Messages(self._say)
        self._title = ""
        self._phase, self._step = "load", 0
        self._done = self._total = 0
        self._begin = self._phase_begin = time.monotonic()
        self._steps_here = 0
        self._history: list[Metrics] = []
        self._accuracy: list[float] = []
        self._rows: list[Any] = []
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=2,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def started(self, recipe: Recipe, out: Path, step: int) -> None:
        self._title = f"hetero · {out.name}"
        self._step = step
        self._begin = self._phase_begin = time.monotonic()
        self._messages.open()
        self._say(heading(recipe, out, step))
        self._live.start()

    def phase(self, step: int, name: str) -> None:
        self._step, self._phase = step, name
        self._done = self._total = 0
        self._phase_begin = time.monotonic()

    def progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def stepped(self, metrics: Metrics, rows: Rows) -> None:
        self._steps_here += 1
        self._history.append(metrics)
        self._rows = list(chosen(rows, self._recipe.log.samples))
        self._say(step_line(metrics, self._recipe.train.steps))

    def evaluated(self, record: Metrics) -> None:
        if record.get("accuracy") is not None:
            self._accuracy.append(record["accuracy"])
        self._say(evaluation_line(record))

    def ended(self) -> None:
        self._live.stop()
        self._messages.close()

    def _say(self, line: str) -> None:
        """A line that stays, above the panel. Never markup: it may hold what a model wrote."""
        self._console.print(Text(line, style="bright_black"), soft_wrap=True)

    def _render(self) -> Any:
        return panel(self._title, self._progress(), self._history, self._accuracy, self._rows)

    def _progress(self) -> Table:
        steps, now = self._recipe.train.steps, time.monotonic()
        finished = self._history[-1]["step"] if self._history else min(self._step, steps)
        used = now - self._begin
        left = ""
        if self._steps_here:
            left = f"about {duration(used / self._steps_here * (steps - finished))} left"
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            bar(finished / steps, 24),
            Text(f"step {max(self._step, finished)}/{steps}", style="bold"),
            Text(f"{duration(used)}, {left}" if left else duration(used), style="bright_black"),
        )
        inside = f"{self._done}/{self._total}" if self._total else duration(now - self._phase_begin)
        part = self._done / self._total if self._total else 0.0
        grid.add_row(
            bar(part, 24), Text(_NAMES.get(self._phase, self._phase)), Text(inside, style="bright_black")
        )
        return grid
