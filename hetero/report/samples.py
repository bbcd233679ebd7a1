"""The table of completions: what the model wrote, step by step. Everything from the model is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from hetero.report.markup import element, text
from hetero.report.numbers import fixed
from hetero.report.run_files import Record, Run

_PER_STEP = 24
_MAX_STEPS = 120
_LONGEST = 4000


def completions_section(run: Run) -> str:
    """A section with one table per step; "" without completions.

    Of a step with many completions the first groups are shown, of a run with many steps an even choice that
    has the first and the last. What is left out is said.
    """
    steps = [
        (step, list(rows)) for step, rows in groupby(run.completions, key=lambda record: int(record["step"]))
    ]
    if not steps:
        return ""
    shown = steps
    if len(steps) > _MAX_STEPS:
        shown = [steps[round(i * (len(steps) - 1) / (_MAX_STEPS - 1))] for i in range(_MAX_STEPS)]
    total = sum(len(rows) for _, rows in steps)
    count = sum(min(len(rows), _PER_STEP) for _, rows in shown)
    said = (
        ""
        if count == total
        else f" Shown are {count:,} of {total:,}; completions.jsonl has all that were kept."
    )
    tables = "".join(_table(step, rows) for step, rows in shown)
    lead = element("p", f"Answers to the training prompts, as sampled.{said}", class_="lead")
    return element(
        "section", element("h2", "What it wrote"), lead, _picker(len(shown)), tables, id="completions"
    )


def _picker(count: int) -> str:
    """Chooses the step; the page's script brings it to life."""

    def button(move: int, sign: str, label: str) -> str:
        return element("button", sign, type="button", data_move=move, aria_label=label)

    return element(
        "div",
        button(-1, "‹", "previous step"),
        element("input", type="range", min=0, max=count - 1, value=count - 1, aria_label="step"),
        button(1, "›", "next step"),
        element("output"),
        element("label", element("input", type="checkbox", data_filter="worse"), "only below the mean"),
        class_="picker",
        hidden=True,
    )


def _table(step: int, rows: Sequence[Record]) -> str:
    known = [row["reward"] for row in rows if _is_number(row.get("reward"))]
    mean = sum(known) / len(known) if known else None
    about = f"{len(rows)} answers" + (f", mean reward {fixed(mean)}" if mean is not None else "")
    heads = (element("th", title) for title in ("Prompt", "Answer of the model", "Reward", "Tokens"))
    groups = (list(group) for _, group in groupby(rows[:_PER_STEP], key=_group_of))
    bodies = (element("tbody", *_prompt_rows(group, mean)) for group in groups)
    table = element("table", element("thead", element("tr", *heads)), *bodies)
    head = element("h3", f"Step {step}", element("small", about))
    return element("section", head, element("div", table, class_="scroll"), class_="step", data_step=step)


def _group_of(row: Record) -> Any:
    return row.get("serial", row.get("prompt"))


def _prompt_rows(rows: Sequence[Record], mean: float | None) -> Iterator[str]:
    """The answers to one prompt; the prompt stands beside them once."""
    for number, row in enumerate(rows):
        reward: Any = row.get("reward")
        known = _is_number(reward)
        side = _side(reward, mean)
        head = ""
        if number == 0:
            wanted = row.get("answer")
            gold = "" if wanted is None else element("div", "expected ", _cut(wanted), class_="gold")
            head = element("th", _cut(row.get("prompt", "")), gold, scope="rowgroup", rowspan=len(rows))
        cut = ""
        if row.get("finish_reason") == "length":
            cut = element("span", "cut off", class_="cut", title="reached the token limit")
        shown = element("span", fixed(float(reward)) if known else "masked")
        title = json.dumps(row.get("rewards") or {}) if known else str(row.get("error") or "no reward")
        yield element(
            "tr",
            head,
            element("td", _cut(row.get("completion", "")), cut, class_="said"),
            element("td", shown, class_="reward", title=title),
            element("td", text(row.get("num_tokens", "")), class_="count"),
            class_=side,
        )


def _side(reward: Any, mean: float | None) -> str:
    if not _is_number(reward):
        return "masked"
    return "better" if mean is None or reward >= mean else "worse"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _cut(value: Any) -> str:
    whole = str(value)
    return text(whole if len(whole) <= _LONGEST else whole[:_LONGEST] + " …")
