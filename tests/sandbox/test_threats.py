"""The threat table. Every attack fails on a box, and succeeds on one where its one defence is switched
off."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attacks
import pytest

from hetero.sandbox import isolation, repository
from hetero.sandbox.client import Launcher
from hetero.sandbox.errors import ImageError, IsolationUnavailable, PolicyDenied
from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.repository import has_object, prepare_repository
from hetero.sandbox.sandbox import Sandbox

Make = Callable[..., Sandbox]
ROOT = Path(__file__).resolve().parents[2]


def python(box: Sandbox, code: str, *arguments: str, timeout: float = 30) -> str:
    """Standard output of a Python program in the box."""
    return box.exec(["python3", "-c", code, *arguments], timeout=timeout).stdout


def test_1_the_host_s_files_are_not_there(make_box: Make, host_dir: Path) -> None:
    answer = host_dir / "answer"
    answer.write_text("42")
    home = Path.home()
    paths = f"/etc/shadow /root {home} {answer} /proc/1/root{answer} {Path.cwd()} /mnt{answer}"
    box = make_box()
    for path in paths.split():
        assert box.exec(["cat", path]).stdout == ""
        assert not box.exec(["test", "-r", path]).ok or path == "/mnt"
    assert make_box("root").exec(["cat", f"/mnt{answer}"]).stdout == "42"


def test_2_a_prepared_repository_has_no_history(make_box: Make, host_dir: Path) -> None:
    origin, task = host_dir / "origin", host_dir / "task"

    def git(*arguments: str) -> str:
        name = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "safe.directory=*"]
        return subprocess.run(
            ["git", "-C", str(origin), *name, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    origin.mkdir()
    git("init", "-q", "-b", "main")
    (origin / "code.py").write_text("broken\n")
    git("add", "."), git("commit", "-qm", "base")
    base = git("rev-parse", "HEAD")
    (origin / "code.py").write_text("the fix\n")
    git("commit", "-qam", "fix"), git("tag", "v2"), git("branch", "later")
    fix = git("rev-parse", "HEAD")
    git("reset", "-q", "--hard", base)
    prepare_repository(origin, base, task, secrets=(fix,))
    assert not has_object(task, fix)
    hunt = (
        "git log --all --reflog -p; git fsck --lost-found 2>&1; git for-each-ref; git remote -v;"
        " git cat-file --batch-all-objects --batch; find .git -type f | xargs grep -l 'the fix'"
    )
    strong, weak = make_box(image=task), make_box(image=origin)
    found = strong.exec(hunt).stdout
    assert "the fix" not in found
    assert fix not in found
    assert strong.exec("git rev-list --all --count").stdout == "1\n"
    assert "the fix" in weak.exec(hunt).stdout
    with pytest.raises(ImageError, match="leak"):
        prepare_repository(origin, fix, host_dir / "leaky", secrets=(git("rev-parse", f"{fix}^{{tree}}"),))


def test_3_protected_files_cannot_be_changed(make_box: Make, host_dir: Path) -> None:
    (host_dir / "deep" / "tests").mkdir(parents=True)
    (host_dir / "deep" / "tests" / "t.py").write_text("assert False")
    policy = Policy(protected=("/workspace/deep/tests",))
    tries = (
        "echo pass > deep/tests/t.py; rm -rf deep/tests; mv deep/tests away; mv deep gone"
        " && mkdir -p deep/tests && echo pass > deep/tests/t.py; ln -sf /tmp/x deep/tests/t.py;"
        " touch deep/tests/conftest.py; true"
    )
    strong = make_box(policy=policy, image=host_dir)
    strong.exec(tries)
    assert strong.read_file("deep/tests/t.py") == b"assert False"
    assert [entry.name for entry in strong.list_dir("deep/tests")] == ["t.py"]
    with pytest.raises(PolicyDenied):
        strong.write_file("deep/tests/t.py", "pass")
    weak = make_box("protect", policy=policy, image=host_dir)
    weak.exec(tries)
    assert not weak.exec("grep -q 'assert False' deep/tests/t.py").ok


def test_5_nothing_writes_after_the_sealing(make_box: Make) -> None:
    """What is graded is what was sealed: a writer that outlived the sealing could change it in between."""
    writer = "trap '' TERM HUP; while true; do echo $((n=n+1)) >> verdict; done"

    def is_still(box: Sandbox) -> bool:
        box.exec(f"setsid --wait sh -c {writer!r}", background=True, timeout=60)
        while not box.exec("test -s verdict").ok:
            pass
        with box.snapshot() as sealed:
            seen = []
            for _ in range(2):
                [child] = sealed.fork(1)
                seen.append(child.read_file("verdict"))
                child.close()
                time.sleep(0.3)
        return seen[0] == seen[1]

    assert is_still(make_box())
    assert not is_still(make_box("seal"))


def test_6_nothing_outlives_the_deadline(make_box: Make) -> None:
    writer = "while [ ! -e stop ]; do sleep 0.05; date +%N > alive; done"
    command = f"setsid sh -c 'trap \"\" TERM HUP; {writer}' & sleep 20"

    def still_writes(box: Sandbox) -> bool:
        assert box.exec(command, timeout=2).timed_out
        before = box.read_file("alive")
        time.sleep(1)
        after = box.read_file("alive")
        box.write_file("stop", "")
        return after != before

    assert not still_writes(make_box())
    assert still_writes(make_box("pidns", policy=Policy(limits=Limits(pids=64))))


def test_7_a_background_child_does_not_hold_the_pipe(make_box: Make) -> None:
    command = "(sleep 2.5 &) ; echo done"
    strong = make_box().exec(command)
    assert strong.stdout == "done\n"
    assert strong.wall_s < 2
    assert make_box("eof", "pidns").exec(command).wall_s > 2


def test_8_the_harness_cannot_be_killed(make_box: Make) -> None:
    def first(box: Sandbox) -> int:
        return int(box._shared.launcher.ask("state", "")["ok"]["boxes"][box.id])

    box = make_box()
    box.exec(f"kill -9 {first(box)} {box._shared.launcher.process.pid} 1; kill -9 -1")
    assert box.exec("echo alive").stdout == "alive\n"
    weak = make_box("pidns", "landlock")
    weak.exec(f"kill -9 {first(weak)}")
    with pytest.raises(Exception, match=r"closed|gone"):
        weak.exec("true")


def test_9_proc_tells_nothing_of_the_harness(make_box: Make, store: Path) -> None:
    look = (
        "cat /proc/1/cmdline | tr -d '\\0'; cat /proc/1/environ 2>/dev/null; cat /proc/self/mountinfo;"
        " ls -l /proc/self/fd /proc/1/fd /proc/1/cwd 2>/dev/null; cat /proc/self/environ"
    )
    seen = make_box().exec(look).stdout
    for secret in (str(store), "hetero", "python", str(ROOT), str(os.getpid())):
        assert secret not in seen, secret
    assert int(make_box().exec("ls -d /proc/[0-9]* | wc -l").stdout) <= 5  # init, bash, ls, wc
    assert str(store) in make_box("names").exec(look).stdout
    pid = os.getpid()
    assert not make_box().exec(f"test -e /proc/{pid}/status").ok
    hidden = make_box("proc", "pidns", "memory")  # or it is charged with all that it sees
    assert hidden.exec(f"test -e /proc/{pid}/status").ok


def test_9_the_launcher_s_arguments_are_overwritten() -> None:
    for weaken, shown in (((), False), (("argv",), True)):
        launcher = Launcher(weaken=weaken)
        launcher.ask("state", "")
        line = Path(f"/proc/{launcher.process.pid}/cmdline").read_bytes()
        assert (b"hetero" in line) is shown
        launcher.close()


def test_10_a_fork_bomb_is_counted_per_box(make_box: Make) -> None:
    policy = Policy(limits=Limits(pids=40))
    first, second = make_box(policy=policy), make_box(policy=policy)
    bomb = first.exec(["python3", "-c", attacks.FORKS.replace("sleep(20)", "sleep(3)")], background=True)
    assert 10 < int(python(second, attacks.FORKS)) <= 40
    assert int(bomb.wait().stdout) <= 40
    assert int(python(make_box("nproc", policy=Policy(limits=Limits(pids=300))), attacks.FORKS)) == 150


@pytest.mark.parametrize("program", [attacks.MEMORY, attacks.ANONYMOUS_MEMORY], ids=["memfd", "anonymous"])
def test_11_a_memory_bomb_is_stopped(make_box: Make, program: str) -> None:
    policy = Policy(limits=Limits(memory_mb=128))
    assert "went off" not in python(make_box(policy=policy), program)
    assert "went off" in python(make_box("memory", policy=policy), program)


def test_11_running_out_of_memory_is_told(make_box: Make) -> None:
    box = make_box(policy=Policy(limits=Limits(memory_mb=64)))
    result = box.exec(["python3", "-c", attacks.ANONYMOUS_MEMORY])
    assert result.oom or "MemoryError" in result.stderr


def test_12_the_disk_is_bounded(make_box: Make) -> None:
    hard = Policy(limits=Limits(disk_hard=True, disk_mb=8, inodes=500))
    box = make_box(policy=hard)
    assert "No space left" in box.exec("head -c 32M /dev/zero > /tmp/big").stderr
    assert box.exec("rm /tmp/big; for i in $(seq 1000); do : > n$i || exit 9; done").exit == 9
    weak = make_box("disk", policy=hard)
    assert weak.exec(
        "head -c 32M /dev/zero > /tmp/big && for i in $(seq 1000); do : > n$i || exit 9; done"
    ).ok
    soft = Policy(limits=Limits(disk_mb=8))
    spread = "for i in 1 2 3 4 5 6; do head -c 4M /dev/zero > f$i; sleep 0.3; done; sleep 3; echo all"
    assert make_box(policy=soft).exec(spread).reason == "disk"
    assert make_box("disk", policy=soft).exec(spread).stdout == "all\n"


def test_13_output_is_bounded(make_box: Make) -> None:
    policy = Policy(limits=Limits(out_kill=1 << 20, out_keep=1000))
    result = make_box(policy=policy).exec(["yes"], timeout=10)
    assert result.reason == "output"
    assert result.truncated
    assert len(result.stdout) < 1100
    assert result.bytes_out < 2 << 20
    weak = make_box("output", policy=policy).exec("yes | head -c 4M")
    assert weak.bytes_out == 4 << 20
    assert weak.ok


def test_14_there_is_no_network(make_box: Make) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        server.listen()
        name = f"hetero-test-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        port = str(server.getsockname()[1])
        strong, weak = make_box(), make_box("network", "landlock")
        assert "connected" not in python(strong, attacks.CONNECT, port)
        assert "connected" not in python(strong, attacks.ABSTRACT, name)
        assert "connected" in python(weak, attacks.CONNECT, port)
        assert "connected" in python(weak, attacks.ABSTRACT, name)
    out = (
        "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 2)\n"
        "except OSError as e: print(e.errno)"
    )
    assert python(strong, out).strip() == "101"
    assert strong.exec("python3 -c 'import socket; socket.getaddrinfo(\"example.org\", 80)'").exit != 0
    assert python(strong, attacks.SOCKETS) == ""
    assert python(make_box("seccomp"), attacks.SOCKETS) != ""


def test_16_the_kernel_s_surface_is_small(make_box: Make) -> None:
    assert python(make_box(), attacks.CALLS) == ""
    reached = python(make_box("seccomp"), attacks.CALLS)
    assert "reached ptrace" in reached or "reached unshare" in reached
    assert "reached clone3" in reached


def test_16_no_capability_is_left(make_box: Make) -> None:
    status = "grep -E '^Cap|^NoNewPrivs|^Seccomp:' /proc/self/status | tr -d '\\n\\t'"
    none = "".join(f"Cap{name}:{'0' * 16}" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert make_box().exec(status).stdout == f"{none}NoNewPrivs:1Seccomp:2"
    assert f"CapBnd:{'0' * 16}" not in make_box("caps").exec(status).stdout
    assert not make_box().exec("su -c true").ok


def test_16_landlock_holds_where_mounts_do_not(make_box: Make) -> None:
    """A read-only tree and Landlock are two walls: with the first gone, the second still stands."""
    if not __import__("hetero.sandbox.launcher.landlock", fromlist=["abi"]).abi():
        pytest.skip("no Landlock on this kernel")
    policy = Policy(writable=("/workspace", "/tmp"))
    box = make_box(policy=policy)
    shm = "echo x > /dev/shm/f"
    assert box.exec(shm).ok
    signal_out = f"kill -0 {box._shared.launcher.ask('state', '')['ok']['boxes'][box.id]}"
    assert not make_box("pidns").exec(signal_out).ok
    assert make_box("pidns", "landlock").exec(signal_out).ok


def test_17_downloads_do_not_leave_the_box(make_box: Make, host_dir: Path) -> None:
    secret = host_dir / "secret"
    secret.write_text("of the host")
    box = make_box()
    links = f"ln -s {secret} link; mkfifo fifo; ln -s /dev/zero zero; ln -s /proc/self/root{secret} magic"
    box.exec(f"{links}; ln -s . up")
    for path in ("link", "fifo", "zero", "magic", f"../../../../../..{secret}", f"up/../../..{secret}"):
        started = time.monotonic()
        with pytest.raises(OSError):
            box.read_file(path)
        assert time.monotonic() - started < 30
    naive = make_box("files")
    naive.exec(f"ln -s {secret} link")
    assert naive.read_file("link") == b"of the host"


def test_18_uploads_do_not_follow_swapped_directories(make_box: Make, host_dir: Path) -> None:
    target = host_dir / "target"
    target.mkdir(mode=0o777)
    target.chmod(0o777)
    box = make_box()
    swap = f"while true; do mkdir -p d; rm -rf d; ln -s {target} d; ln -s /etc e; rm -f d e; done"
    racer = box.exec(swap, background=True)
    for number in range(100):
        try:
            box.write_file("d/file", str(number))
        except (OSError, PolicyDenied):
            continue
    racer.kill()
    racer.wait()
    assert list(target.iterdir()) == []
    box.exec(f"rm -rf d; ln -s {target} d")
    naive = Path(str(box._directory), "u/workspace/d/file")
    naive.write_text("what a harness on the host would have done")
    assert (target / "file").exists()


def test_20_time_is_taken_outside(make_box: Make) -> None:
    box = make_box()
    box.write_file("solution.py", attacks.LIAR)
    assert box.exec(["python3", "solution.py"]).wall_s >= 0.4
    inside = box.exec(["python3", "-c", attacks.INSIDE_TIMER])  # a harness that shares its process
    assert float(inside.stdout) < 0.4
    assert inside.wall_s >= 0.4
    assert not box.exec("date -s 2001-01-01").ok


def test_21_no_core_is_dumped(make_box: Make) -> None:
    limits = "grep 'Max core file size' /proc/self/limits"
    reset = "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0)); r.prlimit(0, r.RLIMIT_CORE, (0, 0));"
    show = "print(open('/proc/self/limits').read())"
    crash = "ulimit -c unlimited; kill -ABRT $$"
    box, weak = make_box(), make_box("core")
    assert box.exec(limits).stdout.split()[4:6] == ["1", "1"]  # with 0, a host program would get the dump
    kept = next(row for row in python(box, reset + show).splitlines() if "core" in row)
    assert kept.split()[4:6] == ["1", "1"]
    assert "Max open files            77" in python(
        box, f"import resource as r; r.setrlimit(7, (77, 77));{show}"
    )
    assert box.exec(crash).signal == 6
    assert box.list_dir() == []
    assert weak.exec(limits).stdout.split()[4] == "unlimited"
    assert weak.exec(crash).signal == 6
    if not Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/", "@")):
        assert [entry.name.partition(".")[0] for entry in weak.list_dir()] == ["core"]


def test_22_nothing_planted_is_read_by_the_harness(
    host_dir: Path, monkeypatch: pytest.MonkeyPatch, make_box: Make
) -> None:
    """A repository whose configuration names programs: preparing it for a task runs none of them."""
    origin, ran = host_dir / "origin", host_dir / "ran"

    def git(*arguments: str) -> bytes:
        name = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "safe.directory=*"]
        return subprocess.run(
            ["git", "-C", str(origin), *name, *arguments], check=True, capture_output=True
        ).stdout

    origin.mkdir()
    git("init", "-q")
    (origin / "code.py").write_text("text\n")
    (origin / ".gitattributes").write_text("*.py filter=evil diff=evil\ncode.py export-ignore\n")
    git("add", "."), git("commit", "-qm", "base")
    plant = f"sh -c 'touch {ran}; cat'"
    for key in (
        "filter.evil.smudge",
        "filter.evil.clean",
        "core.fsmonitor",
        "core.pager",
        "diff.evil.textconv",
    ):
        git("config", key, plant)
    for hook in ("post-checkout", "post-index-change", "pre-commit", "post-commit"):
        (origin / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (origin / ".git" / "hooks" / hook).chmod(0o755)
    prepare_repository(origin, "HEAD", host_dir / "task")
    assert not ran.exists()
    assert (host_dir / "task" / "code.py").read_text() == "text\n"
    box = make_box(image=host_dir / "task")
    assert (
        box.exec("git status --short && git config --list --local && ls .git/hooks").stdout.count("evil") == 0
    )

    def naive(source: Path, commit: str, target: Path) -> None:
        git("checkout-index", "--all", "--force", f"--prefix={target}/")

    monkeypatch.setattr(repository, "export", naive)
    prepare_repository(origin, "HEAD", host_dir / "weak")
    assert ran.exists()


def test_23_forks_do_not_share_randomness(box: Sandbox) -> None:
    first, second = box.fork(2)
    draw = "import random, os, uuid; print(random.random(), os.urandom(8).hex(), uuid.uuid4())"
    drawn = [python(b, draw).split() for b in (first, second)]
    assert all(a != b for a, b in zip(*drawn, strict=True))
    first.close()
    second.close()


NO_NAMESPACES = """
import os, sys
from hetero.sandbox.launcher import kernel as k
uid = os.getuid()
k.unshare(k.CLONE_NEWUSER)
open('/proc/self/setgroups', 'w').write('deny')
open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')
open('/proc/sys/user/max_user_namespaces', 'w').write('0')
from hetero.sandbox import IsolationUnavailable, Sandbox
try:
    Sandbox.create().exec('echo ran')
except IsolationUnavailable as error:
    print('refused:', error)
else:
    print('ran')
"""


def test_24_a_required_tier_is_never_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsolationUnavailable, match="was required"):
        Sandbox.create(min_isolation="microvm")
    monkeypatch.setattr(isolation, "require", lambda *_: None)
    Sandbox.create(min_isolation="microvm").close()


def test_24_without_isolation_nothing_runs(host_dir: Path) -> None:
    host_dir.chmod(0o777)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HETERO_STORE": str(host_dir / "store")}
    done = subprocess.run(
        [sys.executable, "-c", NO_NAMESPACES],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("refused: A sandbox could not be made"), done
    assert "max_user_namespaces" in done.stdout
    from_strong = subprocess.run(
        [sys.executable, "-c", NO_NAMESPACES.replace(".write('0')", ".write('1000')")],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert "refused" not in from_strong.stdout or "used up" not in from_strong.stdout
