"""report.html: one file with curves, completions and the recipe. It needs no network and no server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero.report.charts import sparkline
from hetero.report.curves import curves
from hetero.report.levels import levels_section
from hetero.report.markup import element, text
from hetero.report.numbers import duration, fixed, short, time_parts, visible
from hetero.report.run_files import Run, points, read_run
from hetero.report.samples import completions_section
from hetero.train.checkpoint import storing

_ASSETS = Path(__file__).with_name("assets")
_ENDS = 5
"""Steps at either end whose mean is compared."""


def write_report(directory: str | Path) -> Path:
    """Write `report.html` into a run directory from what is there, finished or not; returns its path.

    Raises CheckpointError when the directory is not one of a run, or cannot be written.
    """
    run = read_run(directory)
    path = run.path / "report.html"
    draft = path.with_suffix(".html.tmp")
    with storing(path):
        draft.write_text(render(run), encoding="utf-8", errors="replace")
        os.replace(draft, path)
    return path


def render(run: Run) -> str:
    """The page."""
    name = run.path.resolve().name
    figures = curves(run)
    charts = element("section", *figures, class_="grid") if figures else ""
    style = (_ASSETS / "report.css").read_text(encoding="utf-8")
    script = (_ASSETS / "report.js").read_text(encoding="utf-8")
    body = "".join(
        (
            _header(run, name),
            _tiles(run),
            _notices(run),
            charts,
            levels_section(run),
            completions_section(run),
            _recipe(run),
            _footer(run),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(name)} · hetero</title><style>{style}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def _header(run: Run, name: str) -> str:
    model = str(run.setting("model.path", ""))
    facts = [Path(model).name if Path(model).is_absolute() else model, str(run.setting("rl.algorithm", ""))]
    prompts, size = run.setting("rl.prompts_per_step"), run.setting("rl.group_size")
    if prompts and size:
        facts.append(f"{prompts} prompts × {size} answers per step")
    listed = (element("li", text(fact)) for fact in facts if fact)
    what = element("div", element("h1", text(name)), element("ul", *listed, class_="facts"))
    toggle = element("button", "Dark", type="button", id="theme", hidden=True)
    return element("header", what, element("div", _progress(run), toggle, class_="state"))


def _progress(run: Run) -> str:
    done, planned = len(run.metrics), run.setting("train.steps")
    if not isinstance(planned, int) or planned < 1:
        return element("span", f"{done} steps")
    said = f"{done} of {planned} steps {'finished' if done >= planned else 'so far'}"
    bar = element("i", style=f"width:{min(done / planned, 1.0):.1%}")
    return element("div", bar, class_="progress", role="img", aria_label=said) + element("span", said)


def _tiles(run: Run) -> str:
    tiles = "".join(_all_tiles(run))
    return element("section", tiles, class_="tiles") if tiles else ""


def _all_tiles(run: Run) -> Iterator[str]:
    rewards = [value for _, value in run.series("reward")]
    if rewards:
        ends = min(_ENDS, max(1, len(rewards) // 2))
        first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        under = f"mean of the first and last {ends} steps" if ends > 1 else "first and last step"
        yield _tile("Reward", _change(first, last, len(rewards)), under, rewards)
    accuracy = [value for _, value in points(run.evaluations, "accuracy")]
    if accuracy:
        under = "held-out tasks, before and after" if len(accuracy) > 1 else "held-out tasks, before training"
        yield _tile("Accuracy", _change(accuracy[0], accuracy[-1], len(accuracy)), under, accuracy)
    largest = [value for _, value in run.series("mismatch/logp_abs_max")]
    if largest:
        exact = max(largest) == 0
        under = "sampler = trainer, bit for bit" if exact else "largest |Δ log p| of any token"
        yield _tile("Mismatch", _strong(short(max(largest)), "good" if exact else "warn"), under, [])
    for title, name in (("Rollout", "perf/rollout_tok_s"), ("Training", "perf/train_tok_s")):
        speeds = [value for _, value in run.series(name)]
        if speeds:
            yield _tile(title, _strong(short(sum(speeds) / len(speeds))), "tokens per second, mean", speeds)
    seconds = sum(sum(time_parts(record).values()) for record in run.metrics)
    if seconds:
        yield _tile(
            "Time", _strong(duration(seconds)), f"{duration(seconds / len(run.metrics))} per step", []
        )


def _tile(title: str, value: str, under: str, line: Sequence[float]) -> str:
    return element(
        "div",
        element("span", text(title), class_="title"),
        element("div", value, sparkline(line), class_="big"),
        element("span", text(under), class_="under"),
        class_="card tile",
    )


def _strong(value: str, kind: str | None = None) -> str:
    return element("b", text(value), class_=kind)


def _change(first: float, last: float, count: int) -> str:
    if count < 2:
        return _strong(fixed(last))
    kind = "good" if last > first else "warn" if last < first else None
    before = element("span", fixed(first), class_="from")
    return before + element("span", "→", class_="arrow") + _strong(fixed(last), kind)


def _notices(run: Run) -> str:
    """What went wrong on the way, in words."""
    sums = {name: round(sum(value for _, value in run.series(f"data/{name}"))) for name in _COUNTERS}
    said = [
        f"{_count(n, what)} {sentence}" for name, (what, sentence) in _COUNTERS.items() if (n := sums[name])
    ]
    first = next((row["error"] for row in run.completions if row.get("error")), None)
    if first and said:
        said.append(f"The first of them: {visible(first, 500)}")
    idle = [int(step) for step, value in run.series("frac_reward_zero_std") if value == 1.0]
    if idle:
        said.append(
            f"{_count(len(idle), 'step')} without any spread of rewards in a group: nothing was learnt there."
        )
    if run.num_bad_lines:
        said.append(f"{_count(run.num_bad_lines, 'line')} of the run's files cannot be read: left out.")
    if not run.metrics:
        said.append("No step is finished yet.")
    items = element("ul", *(element("li", text(one)) for one in said))
    return element("section", element("h2", "Worth knowing"), items, class_="card notices") if said else ""


_COUNTERS = {
    "masked": ("answer", "without a reward: left out of training."),
    "reward_timeouts": ("call", "of reward functions took too long."),
    "reward_errors": ("call", "of reward functions failed."),
    "rollout_errors": ("answer", "aborted by the engine."),
}
"""data/<name> -> what is counted, and the rest of the sentence."""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _recipe(run: Run) -> str:
    if not run.recipe_text:
        return ""
    lines = "\n".join(_recipe_line(line) for line in run.recipe_text.rstrip().split("\n"))
    summary = element("summary", element("h2", "Recipe"))
    return element("section", element("details", summary, element("pre", lines, class_="card")), id="recipe")


def _recipe_line(line: str) -> str:
    if line.lstrip().startswith("#"):
        return element("span", text(line), class_="comment")
    key, colon, rest = line.partition(":")
    if not colon or line.lstrip().startswith("-"):
        return text(line)
    return element("b", text(key)) + text(f":{rest}")


def _footer(run: Run) -> str:
    return element("footer", f"Written by hetero from {text(run.path)}")
