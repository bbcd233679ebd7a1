"""Journals lose nothing but what comes after the step they are rewound to."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import CheckpointError
from hetero.run.journal import Journal


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    assert journal.read() == []
    records = [{"step": 1, "text": "é\n\u2028"}, {"step": 1, "x": 0.1}, {"step": 2, "x": None}]
    journal.write(records[:2])
    journal.write(records[2:])
    journal.write([])
    assert journal.read() == records
    assert (tmp_path / "a.jsonl").read_text(encoding="utf-8").count("\n") == 3


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308]
    journal.write([{"step": 0, "v": values}])
    assert journal.read()[0]["v"] == values


@pytest.mark.parametrize("torn", [1, 5, 12])
def test_rewind_drops_later_steps_and_a_torn_line(torn: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    journal = Journal(path)
    journal.write({"step": step} for step in (0, 1, 1, 2, 3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-torn])
    journal.rewind(1)
    assert [record["step"] for record in journal.read()] == [0, 1, 1]
    journal.write([{"step": 2}])
    assert [record["step"] for record in journal.read()] == [0, 1, 1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_rewinding_what_is_not_there_makes_nothing(tmp_path: Path) -> None:
    Journal(tmp_path / "a.jsonl").rewind(3)
    assert not list(tmp_path.iterdir())


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        journal.write([{"step": 1, "loss": float("nan")}])
    assert journal.read() == []


@pytest.mark.parametrize("line", ["broken", "[1]", '{"loss": 1}', "\0\0\0"])
def test_a_line_of_somebody_else_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"a\.jsonl line 2 is damaged.*Delete"):
        Journal(path).read()


def test_a_full_disk_is_an_error_that_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"/dev/full cannot be written.*No space.*Make room"):
        Journal(Path("/dev/full")).write([{"step": 1}])
