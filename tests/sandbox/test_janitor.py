"""Directories are out of the way at once and removed later, all of them, whatever is in them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hetero.sandbox import janitor as janitors
from hetero.sandbox.janitor import Janitor
from hetero.sandbox.sandbox import Sandbox


def tree(path: Path) -> Path:
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "b" / "f").write_text("x")
    (path / "a" / "b").chmod(0)
    path.chmod(0)
    return path


def test_names_are_free_at_once_and_everything_goes(tmp_path: Path) -> None:
    janitor = Janitor(tmp_path / "gone")
    for _ in range(20):
        janitor.take(tree(tmp_path / "box"))
        assert not (tmp_path / "box").exists()
    janitor.take(tmp_path / "box")  # what is not there is not missed
    janitor.close()
    assert list((tmp_path / "gone").iterdir()) == []
    janitor.take(tree(tmp_path / "box"))  # and again after a close
    janitor.close()
    assert list((tmp_path / "gone").iterdir()) == []


def test_who_takes_away_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = threading.Event()
    remove = janitors.tree.remove
    monkeypatch.setattr(janitors.tree, "remove", lambda path: allowed.wait() and remove(path))
    janitor = Janitor(tmp_path / "gone")
    for _ in range(5):
        janitor.take(tree(tmp_path / "box"))
    assert len(list((tmp_path / "gone").iterdir())) == 5
    allowed.set()
    janitor.close()
    assert list((tmp_path / "gone").iterdir()) == []


def test_boxes_leave_through_it(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    janitor = box._shared.launcher.janitor
    take = janitor.take
    monkeypatch.setattr(janitor, "take", lambda path: (taken.append(Path(path).parent.name), take(path)))
    box.snapshot().close()
    box.close()
    assert taken == ["boxes", "boxes", "layers"]
