"""The tier microvm against a small service that answers as E2B's API is documented."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.sandbox.errors import CapabilityUnavailable, IsolationUnavailable, SandboxDead, SandboxInfraError
from hetero.sandbox.grade import grade
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox
from tests.sandbox.e2b_server import KEY, Server


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(tmp_path / "service")
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()
    assert server.machines == {}, "a box was left at the service"


def remote(template: str = "base", policy: Policy | None = None) -> Sandbox:
    return Sandbox.create(template, tier="microvm", min_isolation="microvm", policy=policy)


def test_commands_and_files(service: Server) -> None:
    with remote() as box:
        assert service.created[0]["allow_internet_access"] is False
        assert service.created[0]["secure"] is True
        assert box.isolation.tier == "microvm"
        result = box.exec("echo out; echo err >&2; exit 3")
        assert (result.exit, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert box.exec(["true"]).ok
        assert box.exec(["no-such-program"]).exit == 127
        assert box.exec(["cat"], stdin="given").stdout == "given"
        assert box.exec(["cat"], stdin="").stdout == ""
        box.write_file("deep/er/f", b"\0\xff\r\n--", mode=0o755)
        assert box.read_file("/workspace/deep/er/f") == b"\0\xff\r\n--"
        assert box.read_file("deep/er/f", max_bytes=2, offset=1) == b"\xff\r"
        entry = box.list_dir("deep/er")[0]
        assert (entry.name, entry.kind, entry.size, entry.mode) == ("f", "file", 6, 0o755)
        with pytest.raises(FileNotFoundError):
            box.read_file("nothing")
        with pytest.raises(IsADirectoryError):
            box.read_file("deep")


def test_deadline_output_limit_streams_and_kill(service: Server) -> None:
    with remote(policy=Policy(limits=Limits(out_keep=1000, out_kill=100_000))) as box:
        late = box.exec(["sleep", "30"], timeout=0.3)
        assert (late.timed_out, late.exit, late.signal) == (True, None, 9)
        flood = box.exec(["yes"], timeout=30)
        assert (flood.reason, flood.truncated) == ("output", True)
        process = box.exec(["sh", "-c", "while read l; do echo got $l; done"], background=True, stdin=b"")
        process.write(b"one\n")
        assert next(iter(process)) == ("stdout", b"got one\n")
        process.write(b"two\n", end=True)
        assert process.wait().stdout == "got one\ngot two\n"
        endless = box.exec(["sleep", "60"], background=True)
        endless.kill()
        assert endless.wait().reason == "killed"


def test_pause_snapshot_fork(service: Server) -> None:
    with remote() as box:
        box.write_file("f", "one")
        box.pause()
        with pytest.raises(SandboxDead, match="hibernated"):
            box.exec("true")
        box.resume()
        assert box.read_file("f") == b"one"
        snap = box.snapshot("frozen_copy")
        box.write_file("f", "two")
        kids = [*snap.fork(2), *box.fork(1)]
        assert [kid.read_file("f") for kid in kids] == [b"one", b"one", b"two"]
        assert len({kid._agent.headers["X-Access-Token"] for kid in kids}) == 3  # type: ignore[attr-defined]
        snap.close()
        for kid in kids:
            kid.close()
        assert set(service.templates) == {"base"}


def test_a_box_in_use_is_prolonged(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with remote() as box:
        machine = next(iter(service.machines.values()))
        box.exec("true")
        assert machine.timeouts == []
        box.exec("true", timeout=5000)
        assert machine.timeouts == [8600]
        box.list_dir()
        assert machine.timeouts == [8600]
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 7000)
        box.list_dir()
        assert machine.timeouts == [8600, 3600]


def test_what_the_service_cannot_do_is_refused(service: Server) -> None:
    with remote() as box:
        for attempt in (box.snapshot, box.changes, lambda: box.pause("hibernate")):
            with pytest.raises(CapabilityUnavailable):
                attempt()
        with pytest.raises(CapabilityUnavailable, match="memory"):
            grade(box, {"t.py": "def test_a(): pass"}, ["t.py::test_a"])
        process = box.exec(["sleep", "60"], background=True)
        with pytest.raises(CapabilityUnavailable, match="running"):
            box.pause()
        process.kill()
        process.wait()
    for policy in (
        Policy(protected=("/workspace/tests",)),
        Policy(readable=("/opt",)),
        Policy(writable=("/workspace",)),
    ):
        with pytest.raises(CapabilityUnavailable):
            remote(policy=policy)
    with pytest.raises(CapabilityUnavailable, match="template"):
        Sandbox.create(Path("/opt"), tier="microvm", min_isolation="microvm")


def test_a_service_that_fails_is_no_result(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxInfraError, match="no template"):
        remote("none-such")
    with remote() as box:
        machine = next(iter(service.machines.values()))
        machine.token = "changed"
        with pytest.raises(SandboxInfraError, match="token"):
            box.exec("true")
        with pytest.raises(SandboxInfraError, match="token"):
            box.read_file("f")
    with remote() as gone:
        name = gone._remote  # type: ignore[attr-defined]
        machine = service.machines.pop(name)
        with pytest.raises(SandboxDead, match="gone from the service"):
            gone.pause()
    monkeypatch.setenv("E2B_API_KEY", "wrong")
    with pytest.raises(IsolationUnavailable, match="E2B_API_KEY"):
        remote()
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(IsolationUnavailable, match="E2B_API_KEY"):
        remote()
