"""The journal: everything once, in order, in a chain that shows every change; and the policy's decisions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.sandbox import audit
from hetero.sandbox.errors import PolicyDenied, SandboxInfraError
from hetero.sandbox.policy import Decision, Event, Limits, Policy, deny, flag
from hetero.sandbox.sandbox import Sandbox


def events(journal: Path, box: Sandbox) -> list[dict[str, object]]:
    return [event for event in audit.read(journal) if event["sandbox"] == box.id]


def test_every_action_is_told_once_with_its_changes(journal: Path, box: Sandbox) -> None:
    box.exec("echo 1 > a; mkdir d")
    box.write_file("b", "x")
    box.exec(["false"])
    box.snapshot().close()
    box.pause("freeze")
    box.resume()
    box.close()
    found = events(journal, box)
    names = ["create", "exec", "write", "exec", "snapshot", "pause", "resume", "close"]
    assert [event["event"] for event in found] == names
    first = found[1]
    assert first["argv"] == ["bash", "-c", "echo 1 > a; mkdir d"]
    assert {"/workspace/a", "/workspace/d/"} <= set(first["changed"])  # type: ignore[call-overload]
    assert found[3]["exit"] == 1
    assert "/workspace/a" not in found[3]["changed"] or first["num_changed"]  # type: ignore[operator]
    audit.verify(journal)


def test_the_line_is_there_before_the_result(journal: Path, box: Sandbox) -> None:
    for number in range(5):
        box.exec(["echo", str(number)])
        assert events(journal, box)[-1]["argv"] == ["echo", str(number)]


def test_changed_removed_and_moved_lines_are_found(journal: Path, box: Sandbox, tmp_path: Path) -> None:
    for number in range(4):
        box.exec(["echo", str(number)])
    lines = journal.read_bytes().splitlines(keepends=True)
    forged = json.loads(lines[-2])
    forged["exit"] = 99
    bad = {
        "changed": [*lines[:-2], json.dumps(forged, separators=(",", ":")).encode() + b"\n", lines[-1]],
        "removed": [*lines[:-2], lines[-1]],
        "moved": [*lines[:-2], lines[-1], lines[-2]],
        "first removed": lines[1:],
    }
    copy = tmp_path / "journal"
    copy.write_bytes(b"".join(lines))
    assert audit.verify(copy)[0] == len(lines)
    for name, wrong in bad.items():
        copy.write_bytes(b"".join(wrong))
        with pytest.raises(SandboxInfraError, match="was changed"):
            audit.verify(copy)
        assert name


def test_a_torn_line_is_left_out_and_the_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = audit.Audit(path)
    first.write(sandbox="s", event="a")
    first.close()
    with path.open("ab") as file:
        file.write(b'{"seq":1,"ev')
    again = audit.Audit(path)
    again.write(sandbox="s", event="b")
    again.close()
    assert audit.verify(path)[0] == 2


def test_decisions(journal: Path) -> None:
    def decide(event: Event) -> Decision:
        if event.kind == "write" and event.detail["path"].endswith(".pth"):
            return deny("no path files")
        if event.kind == "exec" and "git" in event.detail["argv"]:
            return flag("git")
        if event.kind == "exec" and "boom" in event.detail["argv"]:
            raise RuntimeError("callback bug")
        return Decision("allow")

    with Sandbox.create(policy=Policy(on_event=decide, limits=Limits())) as box:
        with pytest.raises(PolicyDenied, match="no path files"):
            box.write_file("x.pth", "import os")
        with pytest.raises(PolicyDenied, match="callback failed"):
            box.exec(["boom"])
        box.exec(["git", "--version"])
        assert box.list_dir() == []
    found = events(journal, box)
    assert [event["event"] for event in found] == ["create", "denied", "denied", "exec", "close"]
    assert (found[3]["decision"], found[3]["decision_reason"]) == ("flag", "git")


def test_protected_hits_are_named(journal: Path, host_dir: Path) -> None:
    (host_dir / "tests").mkdir()
    (host_dir / "tests" / "t").write_text("x")
    policy = Policy(protected=("/workspace/tests",))
    with Sandbox.create(host_dir, policy=policy, _weaken=("protect",)) as box:
        box.exec("echo y > tests/t")
    last = next(event for event in events(journal, box) if event["event"] == "exec")
    assert "/workspace/tests/t" in last["protected_hits"]  # type: ignore[operator]
    assert last["weakened"] == ["protect"]


def test_long_commands_are_hashed(journal: Path, box: Sandbox) -> None:
    box.exec(["true", "x" * 10_000])
    last = events(journal, box)[-1]
    assert "argv" not in last
    assert len(str(last["argv_start"])) == 4096
    assert len(str(last["argv_sha256"])) == 64


def test_commands_verify_and_show(journal: Path, box: Sandbox, tmp_path: Path) -> None:
    def hetero(*arguments: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).resolve().parents[2]
        return subprocess.run(
            [sys.executable, "-m", "hetero.cli", "sandbox", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), *filter(None, sys.path)))},
            check=False,
        )

    box.exec(["echo", "seen"])
    assert "chain holds" in hetero("audit", "verify", str(journal)).stdout
    assert '["echo", "seen"]' in hetero("audit", "show", str(journal)).stdout
    broken = tmp_path / "broken"
    broken.write_bytes(journal.read_bytes().replace(b"seen", b"none"))
    done = hetero("audit", "verify", str(broken))
    assert done.returncode == 1
    assert "was changed" in done.stderr
    run = hetero("run", "--timeout", "5", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (run.returncode, run.stdout, run.stderr) == (3, "out\n", "err\n")
    assert hetero("run", "--timeout", "0.2", "--", "sleep", "9").returncode == 124
    assert hetero("run", "--min-isolation", "microvm", "--", "true").returncode == 1
    assert hetero("run", "--image", "/nowhere", "--", "true").returncode == 1
