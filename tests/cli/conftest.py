"""Runs the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hetero.cli import main


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def hetero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`hetero(*arguments)`: exit status, standard output, standard error."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["hetero", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        return Result(status, *capsys.readouterr())

    return run
