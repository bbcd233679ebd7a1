"""The tiers beside the default one: the same promises, and a clear refusal of those that they cannot keep."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero.errors import ArgumentError
from hetero.sandbox import client, isolation
from hetero.sandbox.box_files import Change
from hetero.sandbox.errors import (
    CapabilityUnavailable,
    IsolationUnavailable,
    LimitUnavailable,
    PolicyDenied,
    SandboxDead,
)
from hetero.sandbox.grade import grade
from hetero.sandbox.image import Image
from hetero.sandbox.launcher import landlock
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.tiers.bwrap import BubblewrapSandbox
from hetero.sandbox.tiers.gvisor import GvisorSandbox
from tests.sandbox import attacks
from tests.sandbox import test_images as images

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Sandbox]


def _usable(tier: str) -> str:
    """Why a tier cannot be tested here; "" if it can."""
    if tier == "landlock":
        return "" if landlock.abi() >= 6 else "Landlock is older than ABI 6"
    name = {"bwrap": "bwrap", "gvisor": "runsc"}[tier]
    return "" if shutil.which(name) else f"{name} is not installed"


TIERS = [
    pytest.param(tier, marks=pytest.mark.skipif(bool(_usable(tier)), reason=_usable(tier)))
    for tier in ("landlock", "bwrap", "gvisor")
]
tiers = pytest.mark.parametrize("tier", TIERS)
own_namespaces = pytest.mark.parametrize("tier", TIERS[1:])


@pytest.fixture
def make(tier: str) -> Iterator[Make]:
    made: list[Sandbox] = []

    def one(image: object = None, policy: Policy | None = None) -> Sandbox:
        made.append(Sandbox.create(image, tier=tier, min_isolation=tier, policy=policy))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for box in made:
        box.close()


@tiers
def test_commands(make: Make, tier: str) -> None:
    box = make()
    assert box.isolation.tier == tier
    result = box.exec("echo out; echo err >&2; exit 3")
    assert (result.exit, result.signal, result.reason) == (3, None, "")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert box.exec("kill -SEGV $$").status == 139
    missing = box.exec(["no-such-program", "x"])
    assert missing.exit == 127
    assert "no-such-program" in missing.stderr
    assert box.exec(["wc", "-c"], stdin="x" * 200_000).stdout.strip() == "200000"
    assert box.exec(["cat"]).stdout == ""
    forged = "echo 'bwrap: execvp x: No such file or directory' >&2; exit 1"
    for each in (box.exec(forged), box.exec(["/bin/sh", "-c", forged])):
        assert (each.exit, each.failure) == (1, "")
    shown = box.exec("pwd; echo $HOME; env", env={"TASK": "7"}).stdout
    assert shown.startswith(f"{box.inner_path('/workspace')}\n{box.inner_path('/home/agent')}\n")
    assert "TASK=7" in shown
    process = box.exec(["cat"], background=True, stdin=b"")
    process.write(b"one\n")
    assert next(iter(process)) == ("stdout", b"one\n")
    process.write(b"", end=True)
    assert process.wait().ok


@tiers
def test_everything_ends_with_its_command(make: Make, tier: str) -> None:
    box, nap = make(), f"sleep {1_000_000 + os.getpid()}"  # no other run's
    started = time.monotonic()
    late = box.exec(f"setsid sh -c 'trap \"\" TERM; exec {nap}' & {nap}", timeout=1)
    assert late.timed_out
    done = box.exec(f"(setsid {nap} &) ; echo done")
    assert done.stdout == "done\n"
    assert time.monotonic() - started < 20
    assert subprocess.run(["pgrep", "-f", nap], check=False).returncode == 1
    closed = box.exec(nap.split(), background=True)
    box.close()
    assert closed.wait().reason == "closed"
    with pytest.raises(SandboxDead):
        box.exec("true")


@tiers
def test_files_and_changes(make: Make, host_dir: Path) -> None:
    for name in ("edit", "drop", "keep", "tree/a"):
        (host_dir / name).parent.mkdir(exist_ok=True)
        (host_dir / name).write_text(name)
    box = make(image=host_dir)
    assert box.changes() == []
    assert box.read_file("edit") == b"edit"
    assert box.exec("printf x >> edit; rm drop; rm -r tree").ok
    box.write_file("sub/new", b"data", mode=0o600)
    assert box.read_file("/workspace/sub/new", max_bytes=2, offset=1) == b"at"
    entry = box.list_dir("sub")[0]
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("new", "file", 4, 0o600)
    assert set(box.changes()) == {
        Change("/workspace/edit", "M"),
        Change("/workspace/drop", "D"),
        Change("/workspace/tree", "D"),
        Change("/workspace/sub/", "A"),
        Change("/workspace/sub/new", "A"),
    }
    assert (host_dir / "edit").read_text() == "edit"
    with pytest.raises(FileNotFoundError):
        box.read_file("drop")


@tiers
def test_links_lead_nowhere_outside(make: Make, tier: str, host_dir: Path) -> None:
    (host_dir / "secret").write_text("of the host")
    box = make()
    assert box.exec(f"ln -s {host_dir}/secret out; ln -s {host_dir} dir").ok
    for name in ("out", "dir/secret", "../../../../../../../.." + str(host_dir / "secret")):
        with pytest.raises(FileNotFoundError):
            box.read_file(name)
    if tier != "gvisor":  # whose pipes never reach the host
        assert box.exec("mkfifo pipe").ok
        with pytest.raises(OSError, match="regular"):
            box.read_file("pipe")
    with pytest.raises(FileNotFoundError):
        box.write_file("dir/planted", "x")
    assert not (host_dir / "planted").exists()
    box.write_file("out", "replaced")
    assert (host_dir / "secret").read_text() == "of the host"


@tiers
def test_the_host_is_out_of_reach(make: Make, host_dir: Path) -> None:
    (host_dir / "secret").write_text("of the host")
    (host_dir / "secret").chmod(0o666)
    host_dir.chmod(0o777)
    box = make()
    for command in (
        f"cat {host_dir}/secret",
        f"echo x > {host_dir}/new",
        f"rm {host_dir}/secret",
        "cat /etc/shadow",
        "ls /root",
        "echo x > /usr/lib/new",
        f"kill -0 {os.getpid()}",
        f"cat /proc/{os.getpid()}/environ",
    ):
        assert box.exec(command).exit != 0, command
    assert sorted(os.listdir(host_dir)) == ["secret"]
    shown = make(policy=Policy(readable=(str(host_dir),)))
    assert shown.exec(f"cat {host_dir}/secret").stdout == "of the host"
    assert shown.exec(f"echo x > {host_dir}/secret").exit != 0


@contextmanager
def socket_of_host() -> Iterator[int]:
    """The port of a listener on the host's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@tiers
def test_there_is_no_network(make: Make) -> None:
    with socket_of_host() as port:
        result = make().exec(["python3", "-c", attacks.CONNECT, str(port)], timeout=30)
    assert "connected" not in result.stdout
    assert result.exit != 0


@tiers
def test_boxes_cannot_see_each_other(make: Make) -> None:
    one, other = make(), make()
    one.write_file("secret", "of one")
    path = f"{one._directory}/tree/workspace/secret"
    assert other.exec(["cat", path]).exit != 0
    assert one.exec(["cat", "secret"]).stdout == "of one"


@tiers
def test_limits(make: Make) -> None:
    box = make(
        policy=Policy(limits=Limits(pids=40, memory_mb=200, disk_mb=8, out_keep=1000, out_kill=100_000))
    )
    forks = box.exec(["python3", "-c", attacks.FORKS], timeout=10)
    assert forks.reason in ("processes", "memory") or int(forks.stdout) <= 60, forks
    held = "import time; x = [bytearray(b'x' * (1 << 20)) for _ in range(900)]; time.sleep(5)"
    memory = box.exec(["python3", "-c", held], timeout=20)
    assert memory.reason == "memory" or memory.exit not in (0, None)
    assert box.exec(["yes"], timeout=20).reason == "output"
    disk = box.exec("for i in 1 2 3 4 5; do head -c 4M /dev/zero > f$i; sleep 1; done; sleep 20", timeout=20)
    assert disk.reason == "disk"


@tiers
def test_snapshot_fork_and_pause(make: Make) -> None:
    box = make()
    box.write_file("f", "one")
    process = box.exec("for i in 1 2 3 4; do echo $i; sleep 0.3; done", background=True)
    assert next(iter(process))[1].startswith(b"1")
    box.pause()
    with box.snapshot("frozen_copy") as frozen:
        box.resume()
        assert process.wait().stdout == "1\n2\n3\n4\n"
        box.write_file("f", "two")
        snap = box.snapshot()
        box.write_file("f", "three")
        kids = [*snap.fork(2), *frozen.fork(1)]
    assert [kid.read_file("f") for kid in kids] == [b"two", b"two", b"one"]
    assert kids[0].exec("echo mine > f; cat f").stdout == "mine\n"
    assert kids[0].changes() == [Change("/workspace/f", "M")]
    assert (kids[1].read_file("f"), box.read_file("f")) == (b"two", b"three")
    snap.close()
    box.pause("hibernate")
    box.resume()
    assert box.exec("cat f").stdout == "three"
    for kid in kids:
        kid.close()


@tiers
def test_the_owner_s_death_is_the_boxes_end(tier: str, store: Path) -> None:
    code = (
        "import sys, time\nfrom hetero.sandbox import Sandbox\n"
        f"box = Sandbox.create(tier={tier!r}, min_isolation={tier!r})\n"
        "p = box.exec('setsid sleep 65432 & sleep 65432', background=True)\n"
        "time.sleep(1); print('ready', flush=True); time.sleep(60)"
    )
    before = set((store / "runs").iterdir())
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    assert subprocess.run(["pgrep", "-f", "sleep 65432"], check=False).returncode == 0
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-f", "sleep 65432"], check=False).returncode == 0:
        assert time.monotonic() < deadline, "commands outlive their owner"
        time.sleep(0.05)
    while set((store / "runs").iterdir()) - before:
        assert time.monotonic() < deadline, "directories outlive their owner"
        time.sleep(0.05)


@tiers
def test_grading(make: Make) -> None:
    box = make()
    box.write_file("solution.py", "def double(x):\n    return 2 * x\n")
    tests = {"t.py": "import solution\ndef test_a():\n    assert solution.double(4) == 8\n"}
    assert grade(box, tests, ["t.py::test_a"]).passed
    box.write_file("solution.py", "import os\nos._exit(0)\n")
    assert not grade(box, tests, ["t.py::test_a"]).passed


@own_namespaces
def test_protected_paths_and_root_file_systems(make: Make, host_dir: Path) -> None:
    (host_dir / "tests").mkdir()
    (host_dir / "tests/t.py").write_text("given")
    box = make(image=host_dir, policy=Policy(protected=("/workspace/tests",)))
    assert box.exec("echo x > tests/t.py").exit != 0
    assert box.exec("mv tests gone || rm -r tests").exit != 0
    assert box.exec("cat tests/t.py; echo y > other").stdout == "given"
    assert box.exec("touch /new").exit != 0
    assert box.exec(["cat", "/etc/hosts"]).stdout.startswith("127.0.0.1 localhost sandbox")
    with pytest.raises(PolicyDenied):
        box.write_file("tests/t.py", "x")
    with pytest.raises(PolicyDenied):
        box.write_file("/etc/deep/new", "x")
    box.write_file("testsuite", "x")


@own_namespaces
def test_container_images(make: Make, host_dir: Path) -> None:
    rows = [images.entry("etc/.wh.issue"), images.entry("srv/new", b"second"), images.folder("srv/d")]
    over = [images.entry("srv/d/old", b"1"), images.folder("gone"), images.entry("gone/x", b"1")]
    opaque = [images.entry("srv/d/.wh..wh..opq"), images.entry("srv/d/new", b"2"), images.entry(".wh.gone")]
    layers = [images.rootfs(), images.layer(*rows, *over), images.layer(*opaque)]
    box = make(image=images.layout(host_dir / "image", layers, env=["KIND=tiny"]))
    assert box.exec("cat /srv/new; env").stdout.startswith("second")
    assert "KIND=tiny" in box.exec("env").stdout
    assert box.exec("cd /; for f in srv/* srv/d/* gone*; do echo $f; done").stdout.split() == [
        "srv/d",
        "srv/new",
        "srv/d/new",
        "gone*",
    ]
    assert box.exec("cat /etc/issue").exit == 1
    assert box.exec("echo x > /srv/more").exit != 0
    assert box.exec("echo mine > f; cat f").stdout == "mine\n"
    with box.snapshot() as snap:
        (kid,) = snap.fork(1)
    assert kid.exec("cat f /srv/d/new").stdout == "mine\n2"
    kid.close()


def test_landlock_refuses_what_needs_mounts(host_dir: Path) -> None:
    (host_dir / "bin").mkdir()
    for image, policy in (
        (host_dir, Policy()),
        (None, Policy(protected=("/workspace/x",))),
        (None, Policy(writable=("/",))),
        (Image(binds=(("/usr", "/opt/usr"),)), Policy()),
    ):
        with pytest.raises(CapabilityUnavailable):
            Sandbox.create(image, tier="landlock", min_isolation="landlock", policy=policy)
    hard = Policy(limits=Limits(disk_hard=True))
    with pytest.raises(LimitUnavailable, match="disk"):
        Sandbox.create(tier="landlock", min_isolation="landlock", policy=hard)


def test_an_old_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 5)
    with pytest.raises(IsolationUnavailable, match=r"ABI 6; this kernel has 5.*Linux 6.12"):
        Sandbox.create(tier="landlock", min_isolation="landlock")


def test_a_weaker_tier_is_never_enough() -> None:
    with pytest.raises(IsolationUnavailable, match="'ns' was required; here is 'landlock'"):
        Sandbox.create(tier="landlock")
    with pytest.raises(IsolationUnavailable, match="'gvisor' was required"):
        Sandbox.create(min_isolation="gvisor")
    with pytest.raises(ArgumentError, match="no isolation tier"):
        Sandbox.create(tier="docker")
    with pytest.raises(ArgumentError, match="name one of ns"):
        Sandbox.create(tier="process", min_isolation="process")


@pytest.mark.parametrize(("tier", "name"), [("bwrap", "bwrap"), ("gvisor", "runsc")])
def test_a_missing_or_failing_program_is_refused(
    tier: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationUnavailable, match=f"needs the program {name}.*nstall"):
        Sandbox.create(tier=tier, min_isolation=tier)
    broken = Path(os.environ["HETERO_STORE"]) / name  # where the boxes' user may execute it
    broken.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    try:
        with pytest.raises(IsolationUnavailable, match=r"cannot make boxes here: .*(namespaces here|log)"):
            Sandbox.create(tier=tier, min_isolation=tier)
    finally:
        broken.unlink()
    assert list(client.launcher().run.path.joinpath("boxes").iterdir()) == []


def _unstarted(kind: type[Sandbox], policy: Policy) -> Sandbox:
    box = kind(None, Image(), (), policy, {}, ())  # type: ignore[arg-type]
    box._directory = Path("/store/box")
    return box


def test_what_bubblewrap_is_told() -> None:
    policy = Policy(readable=("/data",), protected=("/workspace/tests",))
    box = _unstarted(BubblewrapSandbox, policy)
    assert isinstance(box, BubblewrapSandbox)
    options = " ".join(box.options("/workspace"))
    for part in (
        "--unshare-all --die-with-parent --cap-drop ALL",
        "--ro-bind /store/box/tree / --bind",
        "--bind /store/box/tree/workspace /workspace",
        "--ro-bind /usr /usr",
        "--ro-bind /data /data",
        "--ro-bind-try /store/box/tree/workspace/tests /workspace/tests",
    ):
        assert part in options
    assert options.index("/tree/workspace /workspace") < options.index("/tree/workspace/tests")
    assert "--share-net" not in options


def test_what_gvisor_is_told() -> None:
    box = _unstarted(GvisorSandbox, Policy(readable=("/data",)))
    assert isinstance(box, GvisorSandbox)
    request = {"argv": ["true"], "env": {"A": "b"}, "cwd": "/tmp", "limits": {"files": 64, "cpu": None}}
    config = json.loads(json.dumps(box.config(request)))
    assert config["process"]["noNewPrivileges"] is True
    assert set(map(tuple, config["process"]["capabilities"].values())) == {()}
    assert config["process"]["rlimits"] == [{"type": "RLIMIT_NOFILE", "soft": 64, "hard": 64}]
    assert config["root"] == {"path": "/store/box/tree", "readonly": True}
    mounts = {mount["destination"]: mount for mount in config["mounts"]}
    assert mounts["/workspace"]["source"] == "/store/box/tree/workspace"
    assert "ro" in mounts["/usr"]["options"]
    assert "ro" in mounts["/data"]["options"]
    assert {"type": "network"} in config["linux"]["namespaces"]


def test_reports_say_what_is_only_watched() -> None:
    report = isolation.watched_report("landlock")
    assert report.limits["memory"] == report.limits["pids"] == "soft"
    assert isolation.watched_report("bwrap", pids="hard").limits["pids"] == "hard"


def test_a_file_that_may_not_be_written_is_denied() -> None:
    with (
        Sandbox.create(tier="landlock", min_isolation="landlock") as box,
        pytest.raises(PolicyDenied),
    ):
        box.write_file("/etc/new", "x")
