"""What the live view shows, drawn with rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hetero.report.numbers import duration, fixed, short, time_parts, visible

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLORS = {"rollout": "blue", "reward": "yellow", "train": "cyan", "save": "magenta", "other": "bright_black"}


def panel(
    title: str,
    progress: RenderableType,
    history: Sequence[Mapping[str, Any]],
    accuracy: Sequence[float],
    rows: Any,
) -> Panel:
    """The whole view: the current part of the step, the curves so far, the last step, a few answers."""
    parts: list[RenderableType] = [progress]
    if history:
        parts += [Text(), _curves(history, accuracy), Text(), _time_bar(history[-1])]
    if rows:
        parts += [Text(), _answers(rows)]
    return Panel(
        Group(*parts),
        title=Text(title, style="bold"),
        title_align="left",
        border_style="bright_black",
        padding=(0, 1),
    )


def bar(share: float, width: int) -> Text:
    """A progress bar."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * filled, "blue"), ("━" * (width - filled), "bright_black"))


def spark(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as a line of blocks."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(
        _BLOCKS[min(int((value - low) / span * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in shown
    )


def _curves(history: Sequence[Mapping[str, Any]], accuracy: Sequence[float]) -> Table:
    last = history[-1]
    grid = Table.grid(padding=(0, 2))
    rewards = [record["reward"] for record in history if record.get("reward") is not None]
    change = Text()
    if rewards:
        change = Text.assemble((fixed(rewards[0]), "bright_black"), " → ", (fixed(rewards[-1]), "bold green"))
    grid.add_row(Text("reward", style="bright_black"), change, Text(spark(rewards), style="green"))
    if accuracy:
        text = Text.assemble((fixed(accuracy[0]), "bright_black"))
        if len(accuracy) > 1:
            text.append_text(Text.assemble(" → ", (fixed(accuracy[-1]), "bold green")))
        grid.add_row(Text("accuracy", style="bright_black"), text, Text("held-out", style="bright_black"))
    mismatch = last.get("mismatch/logp_abs_max")
    facts = Text.assemble(
        *_fact("loss", last.get("loss")),
        *_fact("grad", last.get("grad_norm")),
        *_fact("entropy", last.get("entropy")),
        *_fact("length", last.get("completions/mean_length")),
        ("mismatch ", "bright_black"),
        (short(mismatch), "green" if mismatch == 0 else "yellow"),
    )
    return _stack(grid, facts)


def _stack(*parts: RenderableType) -> Table:
    table = Table.grid()
    for part in parts:
        table.add_row(part)
    return table


def _fact(name: str, value: Any) -> list[tuple[str, str]]:
    return [(f"{name} ", "bright_black"), (f"{short(value)}   ", "")]


def _time_bar(last: Mapping[str, Any], width: int = 40) -> Table:
    """Where the last step's time went, as one bar."""
    times = time_parts(last)
    whole = sum(times.values())
    line, legend = Text(), Text()
    for part, seconds in times.items():
        share = seconds / whole if whole else 0.0
        line.append("█" * round(share * width), _COLORS[part])
        if share >= 0.005:
            legend.append("■ ", _COLORS[part])
            legend.append(f"{part} {share:.0%}  ", "bright_black")
    speed = Text.assemble(
        (duration(whole), "bold"),
        (" per step   ", "bright_black"),
        (short(last.get("perf/rollout_tok_s")), "bold"),
        (" tok/s rollout   ", "bright_black"),
        (short(last.get("perf/train_tok_s")), "bold"),
        (" tok/s train", "bright_black"),
    )
    row = Table.grid(padding=(0, 2))
    row.add_row(line, legend)
    return _stack(row, speed)


def _answers(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(min_width=5, justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    best = max(row["reward"] for row in rows)
    for row in rows:
        style = "green" if row["reward"] == best else "red"
        said = visible(row.get("completion", "")) or "(nothing)"
        table.add_row(
            Text(fixed(row["reward"], 2), style),
            Text(visible(row.get("prompt", "")), "bright_black"),
            Text(said),
        )
    return table
