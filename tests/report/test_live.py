from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console
from test_report import completion, metrics

from hetero.recipe.recipe import Recipe
from hetero.report.lines import LineView, chosen, step_line, time_shares
from hetero.report.live import LiveView, live_view

ROWS = [completion(1, number) for number in range(8)]


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.from_yaml(
        """
model: {path: tiny}
data: {train: arithmetic}
rl: {rewards: [last_number], prompts_per_step: 4, group_size: 2}
train: {steps: 12}
log: {samples: 3}
"""
    )


def _watch(view, recipe) -> None:
    """A run in small."""
    view.started(recipe, Path("runs/small"), 0)
    view.phase(0, "load")
    view.phase(0, "eval")
    view.evaluated({"step": 0, "accuracy": 0.25, "samples": 40, "masked": 0, "time/eval": 2.0})
    for step in (1, 2):
        view.phase(step, "rollout")
        view.progress(3, 8)
        view.phase(step, "train")
        view.stepped(metrics(step, **{"data/masked": 2 * (step - 1)}), ROWS)
    logging.getLogger("hetero.rl.task").warning("2 of 3 prompts \x1b[31mare long")
    view.evaluated({"step": 2, "accuracy": None})
    view.ended()


def test_plain_lines(recipe):
    lines: list[str] = []
    _watch(LineView(recipe, lines.append), recipe)
    assert lines[0] == "tiny -> runs/small: 12 steps of 4 prompts x 2 answers (grpo)"
    assert lines[1] == "loading the model"
    assert lines[2] == "eval after step 0: accuracy 0.250 of 40 answers in 2.0 s"
    assert lines[3].startswith(
        "step  1/12  reward 0.220 ±0.30  length 10  loss 0.00841  grad 1  mismatch 0  800 tok/s out"
    )
    assert "5.5 s: rollout 55% reward 2% train 36%" in lines[3]
    assert "masked" not in lines[3]
    assert lines[7].endswith("2 masked")
    assert lines[4:7] == [
        "     1.00  prompt 0  ->  said 1.1",
        "     0.00  prompt 3  ->  said 1.6",
        "     1.00  prompt 1  ->  said 1.3",
    ]
    assert lines[11] == "warning: 2 of 3 prompts ␛[31mare long"
    assert lines[12] == "eval after step 2: accuracy -"
    assert len(lines) == 13


def test_shares_of_time_are_shares_of_one_whole(recipe):
    """Saving is not in time/step."""
    record = metrics(3, **{"time/save": 5.5, "time/step": 5.5})
    assert time_shares(record) == "rollout 27% reward 1% train 18% save 50% other 4%"
    assert time_shares({"step": 1}) == "rollout 0% reward 0% train 0%"
    assert "11.0 s: rollout 27%" in step_line(record, 9)


def test_lines_come_out_at_once(recipe, capsys):
    view = LineView(recipe)
    view.started(recipe, Path("x"), 5)
    assert (
        capsys.readouterr().out
        == "tiny -> x: 12 steps of 4 prompts x 2 answers (grpo), going on after step 5\n"
    )
    view.ended()


def test_a_terminal_gets_the_live_view_and_a_pipe_lines(recipe):
    assert isinstance(live_view(recipe, Console(file=io.StringIO(), force_terminal=True)), LiveView)
    assert isinstance(live_view(recipe, Console(file=io.StringIO())), LineView)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_live_view_at_any_width(recipe, width):
    out = io.StringIO()
    view = LiveView(recipe, Console(file=out, force_terminal=True, width=width, height=40, color_system=None))
    _watch(view, recipe)
    text = out.getvalue()
    assert "step  2/12" in text
    if width >= 80:
        for part in (
            "hetero · small",
            "reward",
            "0.220 → 0.240",
            "accuracy",
            "said 1.1",
            "mismatch 0",
            "warning: 2 of 3",
        ):
            assert part in text, part
    assert "\x1b[31mare" not in text
    assert not logging.getLogger("hetero").handlers, "the logger is given back"


def test_the_live_view_shows_nothing_it_does_not_have(recipe):
    view = LiveView(recipe, Console(file=io.StringIO(), force_terminal=True, width=100))
    view.started(recipe, Path("runs/small"), 0)
    bare = {"step": 1}
    view.stepped(bare, [])
    view.stepped({"step": 2, "reward": None, "time/step": 0.0}, [completion(2, 0, reward=None)])
    console = Console(file=io.StringIO(), width=100)
    console.print(view._render())
    assert "step 2/12" in console.file.getvalue()
    view.ended()
    view.ended()


def test_markup_of_a_model_is_text(recipe):
    out = io.StringIO()
    view = LiveView(recipe, Console(file=out, force_terminal=True, width=120, color_system=None))
    view.started(recipe, Path("[bold]x"), 0)
    view.stepped(metrics(1), [completion(1, 1, completion="[red]hot[/red] [/oops]")])
    view.ended()
    assert "[red]hot[/red] [/oops]" in out.getvalue()
    assert "[bold]x" in out.getvalue()


def test_chosen_rows_are_best_and_worst_of_different_prompts():
    rows = [completion(1, n, reward=r) for n, r in enumerate([0.5, 0.9, 0.1, None, 0.9, 0.2])]
    assert [row["reward"] for row in chosen(rows, 4)] == [0.9, 0.1, 0.9, 0.2]
    assert [row["sample"] + 2 * row["serial"] for row in chosen(rows, 3)] == [1, 2, 4]
    assert chosen(rows, 0) == []
    assert len(chosen(rows, 99)) == 5
    assert chosen([], 3) == []
