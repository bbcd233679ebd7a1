"""Ours and Transformers on one tiny checkpoint, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.bench.paired import Peer, pairs
from hetero.bench.workload import CASES, Workload
from hetero.errors import UnavailableError


@pytest.mark.parametrize("case", CASES)
def test_a_pair_is_measured_from_any_directory(
    case: str, tiny_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hetero").mkdir()
    (tmp_path / "hetero" / "__init__.py").write_text("raise ImportError('sources without an extension')\n")
    (tmp_path / "model").symlink_to(tiny_moe_dir)
    monkeypatch.chdir(tmp_path)
    workload = Workload(case, num_sequences=4, prompt_tokens=5, new_tokens=3, lora_rank=2, group_size=2)
    ours, theirs, summary = pairs("model", workload, Peer(), num_pairs=1, repeats=1, threads=1)
    assert (ours["side"], theirs["side"]) == ("hetero", "transformers")
    assert ours["num_tokens"] == theirs["num_tokens"] == workload.num_tokens()
    assert min(ours["seconds"], theirs["seconds"], ours["peak_rss_bytes"], theirs["peak_rss_bytes"]) > 0
    assert summary["ratio"] == pytest.approx(ours["tok_s"] / theirs["tok_s"])
    assert summary["rss_ratio"] == pytest.approx(ours["peak_rss_bytes"] / theirs["peak_rss_bytes"])


def test_a_side_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    workload = Workload("prefill", num_sequences=1, prompt_tokens=2)
    with pytest.raises(UnavailableError, match=r"hetero side of the benchmark failed:\n(.|\n)*config.json"):
        list(pairs(str(tmp_path), workload, None, num_pairs=1, repeats=1, threads=1))
