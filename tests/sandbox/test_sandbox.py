"""Commands and files: what comes back from a box."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.errors import ArgumentError
from hetero.sandbox.box_files import Change
from hetero.sandbox.errors import ImageError, PolicyDenied, SandboxDead
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox

Make = Callable[..., Sandbox]


def test_exit_status_signal_and_streams(box: Sandbox) -> None:
    result = box.exec("echo out; echo err >&2; exit 3")
    assert (result.exit, result.signal, result.reason) == (3, None, "")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert box.exec("kill -SEGV $$").signal == 11
    assert box.exec("kill -SEGV $$").status == 139


def test_abort_leaves_its_signal_and_no_core(box: Sandbox) -> None:
    assert box.exec(["python3", "-c", "import os; os.abort()"]).signal == 6
    assert [entry.name for entry in box.list_dir("/workspace")] == []


def test_a_command_that_is_not_there_is_status_127(box: Sandbox) -> None:
    result = box.exec(["no-such-program", "x"])
    assert result.exit == 127
    assert "no-such-program: No such file" in result.stderr
    assert result.failure == "no-such-program: No such file or directory"
    forged = box.exec("echo 'sandbox: x: No such file or directory' >&2; exit 127")
    assert (forged.exit, forged.failure) == (127, "")
    box.write_file("plain", "text", mode=0o644)
    assert box.exec(["/workspace/plain"]).exit == 126
    assert box.exec(["true"], cwd="/nowhere").exit == 127


def test_standard_input_and_environment(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "of the trainer")
    data = os.urandom(300_000).hex()
    result = box.exec(["wc", "-c"], stdin=data)
    assert result.stdout.strip() == str(len(data))
    shown = box.exec(["env"], env={"TASK": "7"}).stdout
    assert "TASK=7" in shown
    assert "SECRET" not in shown
    assert box.exec(["cat"]).stdout == ""


def test_a_deadline_is_kept_to_the_last_process(box: Sandbox) -> None:
    started = time.monotonic()
    result = box.exec("setsid sh -c 'trap \"\" TERM; sleep 60' & sleep 60", timeout=0.3)
    assert result.timed_out
    assert result.status == 124
    assert time.monotonic() - started < 30
    assert box.exec("pgrep sleep").exit == 1


def test_usage_counts_children_that_were_left_behind(box: Sandbox) -> None:
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass"
    result = box.exec(["bash", "-c", f"(python3 -c '{burn}' &) ; sleep 0.1; exit 0"], timeout=30)
    waited = box.exec(["python3", "-c", burn], timeout=30)
    assert waited.cpu_s >= 0.3
    assert result.cpu_s > 0
    assert waited.max_rss > 4 << 20


def test_background_process_streams_and_takes_input(box: Sandbox) -> None:
    process = box.exec("while read line; do echo got $line; done", background=True, stdin=b"")
    process.write(b"one\n")
    output = iter(process)
    assert next(output) == ("stdout", b"got one\n")
    assert process.running
    process.write(b"two\n", end=True)
    assert process.wait().stdout == "got one\ngot two\n"
    endless = box.exec(["sleep", "60"], background=True)
    endless.kill()
    assert endless.wait().reason == "killed"


def test_files_round_trip(box: Sandbox) -> None:
    data = os.urandom(3 << 20)
    box.write_file("deep/er/blob", data, mode=0o600)
    assert box.read_file("/workspace/deep/er/blob") == data
    assert box.read_file("deep/er/blob", max_bytes=10, offset=5) == data[5:15]
    assert box.exec("stat -c '%a %U' deep/er/blob").stdout == "600 agent\n"
    entry = box.list_dir("deep/er")[0]
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("blob", "file", len(data), 0o600)
    with pytest.raises(FileNotFoundError):
        box.read_file("nothing")
    with pytest.raises(IsADirectoryError):
        box.read_file("deep")
    with pytest.raises(IsADirectoryError):
        box.write_file("deep", "x")
    with pytest.raises(ArgumentError):
        box.read_file("a\0b")


def test_changes_tell_added_modified_and_deleted(make_box: Make, host_dir: Path) -> None:
    for name in ("keep", "edit", "drop", "sub/inner", "tree/a", "tree/b"):
        (host_dir / name).parent.mkdir(exist_ok=True)
        (host_dir / name).write_text(name)
    box = make_box(image=host_dir)
    assert box.changes() == []
    assert box.exec("echo x >> edit; rm drop; echo n > sub/new; rm -r tree; mkdir tree; echo c > tree/c").ok
    found = {(change.kind, change.path) for change in box.changes()}
    assert {
        ("M", "/workspace/edit"),
        ("D", "/workspace/drop"),
        ("A", "/workspace/sub/new"),
        ("A", "/workspace/tree/c"),
        ("M", "/workspace/tree/"),
    } == found
    assert (host_dir / "drop").exists()
    box.snapshot().close()
    assert box.changes() == []
    assert box.exec("rm sub/new").ok
    assert box.changes() == [Change("/workspace/sub/new", "D")]


def test_only_writable_paths_can_be_written(box: Sandbox) -> None:
    for path in ("/etc/passwd", "/new", "/usr/bin/new", "/dev/new", "/proc/sys/kernel/hostname"):
        assert box.exec(["bash", "-c", f"echo x > {path}"]).exit != 0, path
    with pytest.raises(PolicyDenied, match="not writable"):
        box.write_file("/etc/new", "x")
    assert box.exec("echo x > /tmp/new && echo x > /workspace/new && echo x > ~/new").ok


def test_images(make_box: Make, host_dir: Path) -> None:
    with pytest.raises(ImageError, match="neither a directory"):
        make_box(image=host_dir / "none")
    (host_dir / "data.txt").write_text("mine")
    box = make_box(image=host_dir)
    assert box.read_file("data.txt") == b"mine"
    box.write_file("data.txt", "changed")
    assert (host_dir / "data.txt").read_text() == "mine"
    shown = make_box(policy=Policy(readable=(str(host_dir),)))
    assert shown.read_file(f"{host_dir}/data.txt") == b"mine"
    assert shown.exec(f"echo x > {host_dir}/data.txt").exit != 0
    private = host_dir / "private"
    (private / "open").mkdir(parents=True)
    (private / "open" / "f").write_text("shown on purpose")
    (private / "other").write_text("not shown")
    private.chmod(0o700)
    inner = make_box(policy=Policy(readable=(f"{private}/open",)))
    assert inner.read_file(f"{private}/open/f") == b"shown on purpose"
    assert inner.exec(["cat", f"{private}/other"]).exit != 0


def test_a_closed_box_says_so(box: Sandbox) -> None:
    box.close()
    box.close()
    with pytest.raises(SandboxDead, match="closed"):
        box.exec("true")
    with pytest.raises(SandboxDead):
        box.read_file("x")


def test_close_ends_a_running_command(make_box: Make) -> None:
    box = make_box()
    process = box.exec("echo begun; sleep 60", background=True)
    assert next(iter(process)) == ("stdout", b"begun\n")
    box.close()
    assert process.wait().reason == "closed"


def test_bad_limits_and_paths_are_refused() -> None:
    with pytest.raises(ArgumentError, match="pids"):
        Limits(pids=0)
    with pytest.raises(ArgumentError, match="wall_s"):
        Limits(wall_s=-1)
    with pytest.raises(ArgumentError, match="absolute"):
        Policy(writable=("workspace",))
