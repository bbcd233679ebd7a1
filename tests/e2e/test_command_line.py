"""The commands that need a model, as a person runs them."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hetero import loop
from hetero.cli import main
from hetero.cli.talk import Talk, harmless


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """`hetero ...` in this process, in `tmp_path`: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hetero", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        return (status, *capsys.readouterr())

    return call


@pytest.fixture
def trained(small: Any, tmp_path: Path) -> Path:
    out = tmp_path / "run"
    loop.run(small.recipe(train={"steps": 8}), out)
    return out


def test_rl_says_what_became_better_and_what_to_do_next(small: Any, run: Any, tmp_path: Path) -> None:
    status, out, err = run("rl", small.file(), "train.steps=3", "--out", "run")
    assert status == 0, err
    last = out.splitlines()[-4:]
    assert "3 steps in" in " ".join(last)
    assert "Mean reward" in " ".join(last)
    assert "Held-out accuracy" in " ".join(last)
    assert f"hetero chat {small.tree['model']['path']} --adapter run/adapter" in last[-1]
    assert (tmp_path / "run" / "recipe.yaml").is_file()


def test_what_to_do_next_can_be_pasted(small: Any, run: Any, tmp_path: Path) -> None:
    recipe = small.file(model={"experts": "int4"}, train={"steps": 2})
    status, out, err = run("rl", recipe, "--out", "my run")
    assert status == 0, err
    assert "first and last 1 step(s)" in out
    words = shlex.split(out.splitlines()[-1].partition("hetero chat ")[2])
    assert words[1:] == ["--adapter", "my run/adapter", "--experts", "int4"]
    answers = [run("generate", *words[:n], "--prompt", "word a", "--max-tokens", "16") for n in (3, 5)]
    assert [status for status, _, _ in answers] == [0, 0]
    assert answers[0][1] != answers[1][1], "the experts are packed as in training"
    status, _, err = run("generate", words[0], "--experts", "int5", "--prompt", "x")
    assert status == 2
    assert "int4" in err


def test_what_a_file_system_says_is_one_paragraph(small: Any, run: Any, trained: Path) -> None:
    (trained / "report.html").unlink(missing_ok=True)
    (trained / "report.html").mkdir()
    status, _, err = run("report", trained)
    assert status == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    status, _, err = run("rl", small.file(), "--out", f"{small.data}/run")
    assert (status, "cannot be written" in err, "Traceback" in err) == (1, True, False)


def test_an_answer_of_nan_is_an_error(run: Any, small: Any, tmp_path: Path) -> None:
    model = tmp_path / "nan"
    shutil.copytree(small.tree["model"]["path"], model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][7] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    status, _, err = run("generate", model, "--prompt", "word")
    assert status == 1
    assert "NaN" in err


@pytest.mark.parametrize("tty", [True, False])
def test_a_terminal_obeys_nothing_that_a_model_says(tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty, raising=False)
    said = "ok\x1b[2J\r\x9b\n\tو\u200cn"
    assert harmless(said) == ("ok·[2J··\n\tو\u200cn" if tty else said)


def test_rl_makes_new_directories_of_its_own(small: Any, run: Any, tmp_path: Path) -> None:
    for name in ("small", "small-2"):
        status, _, err = run("rl", small.file(), "train.steps=1", "data.eval=null")
        assert status == 0, err
        assert (tmp_path / "runs" / name / "metrics.jsonl").is_file()


def test_a_wrong_key_and_a_missing_file_are_one_paragraph(small: Any, run: Any, tmp_path: Path) -> None:
    for arguments, part in (
        (("rl", small.file(), "rl.group_sise=4", "--out", "run"), "Did you mean rl.group_size?"),
        (("rl", "gone.yaml", "--out", "run"), "no recipe file gone.yaml"),
        (("rl", small.file(), "data.train=gone.jsonl", "--out", "other"), "gone.jsonl"),
    ):
        status, _, err = run(*arguments)
        assert status == 1
        assert err.startswith("error: ")
        assert err.rstrip().count("\n") == 0, err
        assert part in err
    assert not (tmp_path / "run").exists()


def test_a_failing_reward_tells_how_to_go_on(small: Any, run: Any) -> None:
    recipe = small.file(rl=small.reward("raises_from_step_3"), train={"steps": 4})
    status, _, err = run("rl", recipe, "--out", "run")
    assert status == 1
    assert "the judge is out" in err
    assert f"hetero rl {recipe} --out run --resume" in err


def test_eval_measures_with_and_without_adapter(small: Any, run: Any, trained: Path) -> None:
    recipe = small.file(train={"steps": 8})
    status, out, err = run("eval", recipe, "--json")
    assert status == 0, err
    before = json.loads(out)
    status, out, err = run("eval", recipe, "--adapter", trained / "adapter", "--json")
    assert status == 0, err
    after = json.loads(out)
    first, last = (json.loads(line) for line in (trained / "eval.jsonl").read_text().splitlines())
    assert before["reward"] == first["reward"]
    assert after["reward"] == last["reward"]
    status, out, _ = run("eval", recipe, "eval.prompts=1")
    assert "1 held-out task" in out


def test_eval_without_held_out_tasks_says_so(small: Any, run: Any) -> None:
    status, _, err = run("eval", small.file(), "data.eval=null")
    assert status == 1
    assert "data.eval" in err


def test_generate_repeats_itself_and_follows_the_adapter(small: Any, run: Any, trained: Path) -> None:
    model = small.tree["model"]["path"]
    arguments = ("generate", model, "--prompt", "word a", "--max-tokens", "12", "--seed", "3")
    status, first, err = run(*arguments)
    assert status == 0, err
    assert run(*arguments)[1] == first
    assert run(*arguments, "--adapter", trained / "adapter")[1] != first
    assert run(*arguments, "--raw")[1] != first


def test_generate_without_a_model_is_one_paragraph(run: Any, tmp_path: Path) -> None:
    status, _, err = run("generate", "./no-model", "--prompt", "x")
    assert status == 1
    assert err.startswith("error: There is no model './no-model'")
    assert "Traceback" not in err


def test_report_is_one_page_with_the_curves(small: Any, run: Any, trained: Path) -> None:
    status, out, err = run("report", trained)
    assert status == 0, err
    page = Path(out.strip())
    assert page == trained / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "word a" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert run("report", trained.parent)[0] == 1


def test_chat_goes_on_append_only(
    small: Any, run: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    answer = Talk.answer

    def listen(self: Talk, ids: list[int]) -> Any:
        asked.append(list(ids))
        return answer(self, ids)

    lines = iter(["word a", "", "/help", "word b", "/new", "word a"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(Talk, "answer", listen)
    monkeypatch.setattr("builtins.input", read)
    model = small.tree["model"]["path"]
    status, out, err = run("chat", model, "--adapter", trained / "adapter", "--max-tokens", "6")
    assert status == 0, err
    assert "no command /help" in err
    assert out.count("\n") >= 3
    first, second, third = asked
    assert second[: len(first)] == first
    assert len(second) > len(first) + 6
    assert third == first


def test_chat_says_when_the_context_is_full(small: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["x" * 600, "word a", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    status, out, err = run("chat", small.tree["model"]["path"], "--max-tokens", "4")
    assert status == 0, err
    assert "context" in err
    assert "/new" in err
    assert len(out) > 1
