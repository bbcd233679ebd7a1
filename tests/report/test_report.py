from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hetero.errors import CheckpointError
from hetero.report.levels import worst
from hetero.report.page import write_report
from hetero.report.run_files import read_run

RECIPE = """# a comment
model: {path: tiny}
rl: {algorithm: grpo, prompts_per_step: 2, group_size: 2, max_tokens: 16}
train:
  steps: 40
"""
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\" \ud83d\ude00"


def metrics(step: int, **more: object) -> dict:
    return {
        "step": step,
        "reward": 0.2 + step / 50,
        "reward_std": 0.3,
        "frac_reward_zero_std": 0.25,
        "rewards/last_number/mean": 0.5,
        "rewards/number_only/mean": 0.25,
        "loss": math.sin(step) / 100,
        "grad_norm": 1.0 / step,
        "entropy": 1.5,
        "completions/mean_length": 10.0,
        "completions/min_length": 2,
        "completions/max_length": 16,
        "mismatch/logp_abs_max": 0.0,
        "perf/rollout_tok_s": 800.0,
        "perf/train_tok_s": 1500.0,
        "time/rollout": 3.0,
        "time/reward": 0.1,
        "time/train": 2.0,
        "time/step": 5.5,
        **more,
    }


def completion(step: int, number: int, **more: object) -> dict:
    return {
        "step": step,
        "serial": number // 2,
        "sample": number % 2,
        "prompt": f"prompt {number // 2}",
        "completion": f"said {step}.{number}",
        "answer": "4",
        "reward": float(number % 2),
        "rewards": {"last_number": float(number % 2)},
        "num_tokens": 3,
        "finish_reason": "stop",
        "error": "",
        **more,
    }


def write(directory: Path, *, recipe: str = RECIPE, **files: list) -> Path:
    directory.mkdir(exist_ok=True)
    if recipe:
        (directory / "recipe.yaml").write_text(recipe)
    for name, records in files.items():
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (directory / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return directory


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps what a browser would see."""

    VOID = ("meta", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self.stack, self.stack

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag: str, kind: str | None = None) -> list[dict]:
        found = [attributes for name, attributes in self.tags if name == tag]
        return [a for a in found if kind is None or kind in a.get("class", "").split()]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def report(directory: Path) -> Page:
    path = write_report(directory)
    assert path == directory / "report.html"
    assert not list(directory.glob("*.tmp"))
    return Page(path)


def charts(page: Page) -> dict[str, dict]:
    titles = re.findall(r'<figcaption><span class="title">(.*?)</span>', page.source)
    return dict(
        zip(titles, (json.loads(figure["data-chart"]) for figure in page.all("figure", "chart")), strict=True)
    )


def test_a_whole_run(tmp_path):
    steps = range(1, 41)
    run = write(
        tmp_path / "run",
        metrics=[metrics(step) for step in steps],
        eval=[{"step": 0, "accuracy": 0.2}, {"step": 40, "accuracy": 0.9}],
        completions=[completion(step, number) for step in steps for number in range(4)],
    )
    page = report(run)
    drawn = charts(page)
    assert {"Reward", "Held-out accuracy", "Reward functions", "Loss", "Gradient norm", "Entropy"} < set(
        drawn
    )
    assert {
        "Length of answers, tokens",
        "Mismatch of sampler and trainer",
        "Time per step",
        "Tokens per second",
    } < set(drawn)
    assert drawn["Reward"]["series"][0]["points"] == [
        [step, pytest.approx(0.2 + step / 50)] for step in steps
    ]
    assert drawn["Held-out accuracy"]["series"][0]["points"] == [[0, 0.2], [40, 0.9]]
    assert [s["name"] for s in drawn["Reward functions"]["series"]] == ["last_number", "number_only"]
    assert drawn["Time per step"]["series"][-1] == {"name": "other", "points": [[s, 0.4] for s in steps]}
    assert "0.260 → 0.960" in page.words, "the means of five steps at either end"
    assert "0.200 → 0.900" in page.words
    assert "40 of 40 steps finished" in page.words
    assert "bit for bit" in page.words
    assert "Worth knowing" not in page.words
    assert "said 40.3" in page.words
    assert len(page.all("section", "step")) == 40
    assert page.words.count("expected 4") == 80, "a prompt stands once beside its answers"
    assert "prompts_per_step" in page.words


def test_staleness_and_experts_are_drawn_where_there_are_any(tmp_path):
    titles = ["Distance from the sampling policy", "Experts"]
    assert (
        not set(titles) & charts(report(write(tmp_path / "plain", metrics=[metrics(1), metrics(2)]))).keys()
    )
    experts = {"moe/load_max_over_mean": 1.5, "moe/experts_touched": 1.0, "moe/route_flip_rate": 0.0}
    on = [metrics(step, **experts, **{"off_policy/version_lag_max": 0.0}) for step in (1, 2)]
    drawn = charts(report(write(tmp_path / "on", metrics=on)))
    assert titles[0] not in drawn
    assert titles[1] in drawn
    ratios = {"off_policy/ess": 0.9, "off_policy/ratio_min": 0.5, "off_policy/ratio_max": 1.5}
    off = {**experts, **ratios, "off_policy/version_lag_max": 1.0, "moe/route_flip_rate": 0.02}
    page = report(write(tmp_path / "off", metrics=[metrics(step, **off) for step in (1, 2)]))
    assert set(titles) <= charts(page).keys()


def test_what_is_doubtful_or_bad_is_coloured(tmp_path):
    fine = {"mismatch/kl_k3": 0.0, "mismatch/ess": 1.0, "mismatch/is_mean": 1.0, "weights/base_hash_ok": 1.0}
    page = report(write(tmp_path / "fine", metrics=[metrics(1, **fine)]))
    assert [a["class"] for a in page.all("b") if a.get("class") in ("good", "warn", "bad")].count("bad") == 0

    def levels(name: str, exact: bool = True, **values: list[float]) -> dict[str, str]:
        start = {} if exact else {"mismatch/logp_abs_max": 0.1}
        records = [
            metrics(step, **start, **{key: column[step - 1] for key, column in values.items()})
            for step in range(1, 1 + len(next(iter(values.values()))))
        ]
        return {
            w.metric: level for w, _, _, level in worst(read_run(write(tmp_path / name, metrics=records)))
        }

    assert levels("kl", **{"mismatch/kl_k3": [0.0, 1e-9, 0.0]}) == {"mismatch/kl_k3": "bad"}
    assert levels("kl2", False, **{"mismatch/kl_k3": [0.0, 9e-4]}) == {"mismatch/kl_k3": "good"}
    assert levels("kl3", False, **{"mismatch/kl_k3": [2e-3, 9e-4]}) == {"mismatch/kl_k3": "warn"}
    assert levels("kl4", **{"off_policy/kl_k3": [2e-3, 2e-2]}) == {"off_policy/kl_k3": "bad"}
    assert levels("ess", **{"mismatch/ess": [1.0, 0.4, 0.9]}) == {"mismatch/ess": "warn"}
    assert levels("ess2", **{"off_policy/ess": [0.29]}) == {"off_policy/ess": "bad"}
    assert levels("mean", **{"mismatch/is_mean": [1.0, 0.49]}) == {"mismatch/is_mean": "bad"}
    assert levels("mean2", **{"mismatch/is_mean": [1.9, 0.6]}) == {"mismatch/is_mean": "good"}
    error = "mismatch/token_mult_prob_error"
    assert levels("error", **{error: [1.0, 1.021]}) == {error: "bad"}
    assert levels("base", **{"weights/base_hash_ok": [1, 0, 0]}) == {"weights/base_hash_ok": "bad"}
    page = report(tmp_path / "base")
    assert [a for a in page.all("b") if a.get("class") == "bad"]
    assert "weights/base_hash_ok" in page.words


def test_what_a_correction_masks_is_drawn_where_it_masks(tmp_path):
    none = metrics(1, **{"mismatch/masked_token_frac": 0.0})
    some = metrics(2, **{"mismatch/masked_token_frac": 0.1, "lora/delta_norm": 2.0})
    title = "Masked by the correction"
    assert title not in charts(report(write(tmp_path / "none", metrics=[none])))
    assert {title, "Size of the adapter"} <= charts(
        report(write(tmp_path / "some", metrics=[none, some]))
    ).keys()


def test_the_page_needs_nothing_from_outside(tmp_path):
    page = report(write(tmp_path / "run", metrics=[metrics(1)]))
    addresses = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert addresses == []
    assert not re.search(r"https?://|@import|url\(", page.source)


def test_everything_from_outside_is_escaped(tmp_path):
    run = write(
        tmp_path / "run<b>",
        recipe=RECIPE.replace("tiny", "'<i>tiny</i>'") + f"# {EVIL.encode('ascii', 'ignore').decode()}\n",
        metrics=[metrics(1, **{"rewards/<u>bad</u>/mean": 0.5, "data/masked": 1})],
        completions=[
            completion(1, 0, prompt=EVIL, completion=EVIL, answer=EVIL, rewards={EVIL: 1.0}, num_tokens=EVIL),
            completion(1, 1, reward=None, error=EVIL),
        ],
    )
    page = report(run)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert all("style" in attributes for attributes in page.all("i")), "only the progress bar is one"
    assert not page.all("u")
    assert page.words.count("<img src=x onerror=alert(1)>") >= 4
    assert "1 answer without a reward" in page.words
    assert "<u>bad</u>" in page.words


def test_a_run_that_has_just_begun(tmp_path):
    page = report(write(tmp_path / "run"))
    assert "0 of 40 steps so far" in page.words
    assert "No step is finished yet." in page.words
    assert not page.all("figure")
    only_first_eval = report(write(tmp_path / "two", eval=[{"step": 0, "accuracy": 0.25}]))
    assert "before training" in only_first_eval.words
    assert set(charts(only_first_eval)) == {"Held-out accuracy"}


def test_torn_files_and_holes_are_left_out_and_said(tmp_path):
    run = write(
        tmp_path / "run",
        recipe="train: [broken",
        metrics=[
            metrics(2, loss=None, reward=None),
            "not json",
            metrics(1),
            "[1, 2]",
            {"reward": 3.0},
            metrics(3, loss=float("nan")),
            metrics(4, grad_norm="text"),
        ],
        completions=[completion(1, 0), '{"step": 2, "torn'],
    )
    page = report(run)
    drawn = charts(page)
    assert [p[0] for p in drawn["Reward"]["series"][0]["points"]] == [1, 3, 4]
    assert [p[0] for p in drawn["Loss"]["series"][0]["points"]] == [1, 4]
    assert [p[0] for p in drawn["Gradient norm"]["series"][0]["points"]] == [1, 2, 3]
    assert "4 lines of the run's files cannot be read" in page.words
    assert "4 steps" in page.words
    assert [record["step"] for record in read_run(run).metrics] == [1, 2, 3, 4]


def test_trouble_is_told(tmp_path):
    failed = "the reward f failed (exception): Traceback\nZeroDivisionError"
    run = write(
        tmp_path / "run",
        metrics=[
            metrics(
                1,
                **{
                    "data/masked": 3,
                    "data/reward_timeouts": 1,
                    "data/reward_errors": 2,
                    "data/rollout_errors": 1,
                },
            ),
            metrics(2, **{"frac_reward_zero_std": 1.0, "mismatch/logp_abs_max": 0.02}),
        ],
        completions=[completion(1, 0), completion(1, 1, reward=None, error=failed)],
    )
    words = report(run).words
    for part in (
        "3 answers without a reward",
        "1 call of reward functions took too long",
        "2 calls of reward functions failed",
        "1 answer aborted by the engine",
        "The first of them: the reward f failed (exception): Traceback ⏎ ZeroDivisionError",
        "1 step without any spread",
        "largest |Δ log p| of any token",
        "masked",
    ):
        assert part in words, part
    assert "bit for bit" not in words


def test_large_runs_make_pages_of_bounded_size(tmp_path):
    steps = range(1, 1001)
    run = write(
        tmp_path / "run",
        metrics=[metrics(step) for step in steps],
        completions=[
            completion(step, number, completion="w" * 9000) for step in (1, 2) for number in range(64)
        ]
        + [completion(step, 0) for step in range(3, 1001)],
    )
    page = report(run)
    shown = [int(attributes["data-step"]) for attributes in page.all("section", "step")]
    assert len(shown) == 120
    assert (shown[0], shown[-1]) == (1, 1000)
    assert "Shown are 143 of 1,126" in page.words
    assert "w" * 4001 not in page.source
    assert len(page.all("rect", "bar")) < 5 * 81


@pytest.mark.parametrize(
    "make", [lambda path: path, lambda path: path.mkdir(), lambda path: path.write_text("x")]
)
def test_what_is_no_run_is_refused(tmp_path, make):
    make(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no run to report on"):
        write_report(tmp_path / "nothing")


def test_writing_again_replaces_the_page(tmp_path):
    run = write(tmp_path / "run", metrics=[metrics(1)])
    report(run)
    write(run, metrics=[metrics(1), metrics(2)])
    assert "2 of 40 steps" in report(run).words
