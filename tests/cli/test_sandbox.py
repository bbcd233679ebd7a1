"""`hetero sandbox run` and `doctor`, as a shell sees them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that the boxes' user can reach."""
    path = Path(tempfile.mkdtemp(prefix="hetero-cli-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def hetero(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HETERO_STORE": str(place / "store")}
    command = [sys.executable, "-m", "hetero.cli", "sandbox", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module", autouse=True)
def possible(place: Path) -> None:
    if hetero(place, "run", "--", "true").returncode != 0:
        pytest.skip("no sandboxes on this machine")


def test_the_command_s_status_and_streams_are_ours(place: Path) -> None:
    done = hetero(place, "run", "--", "bash", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    late = hetero(place, "run", "--timeout", "0.3", "--", "sleep", "60")
    assert late.returncode == 124
    assert "timeout" in late.stderr


def test_a_tier_is_chosen_and_a_weaker_one_refused(place: Path) -> None:
    refused = hetero(place, "run", "--tier", "landlock", "--", "echo", "ran")
    assert refused.returncode != 0
    assert "'ns' was required" in refused.stderr
    assert "ran" not in refused.stdout
    done = hetero(place, "run", "--tier", "landlock", "--min-isolation", "landlock", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_an_archive_is_an_image(place: Path) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for name in ("usr", "lib", "lib64", "bin"):
            member = tarfile.TarInfo(name)
            if name == "usr":
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            else:
                member.type, member.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(member)
    data = layer.getvalue()
    config = {"rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(data).hexdigest()]}}
    files = {"c.json": json.dumps(config).encode(), "l.tar": data}
    files["manifest.json"] = json.dumps([{"Config": "c.json", "Layers": ["l.tar"]}]).encode()
    path = place / "image.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    done = hetero(place, "run", "--image", str(path), "--", "/bin/true")
    assert done.returncode == 127, "the image has no programs"
    path.write_bytes(path.read_bytes().replace(b"sha256:", b"sha255:"))
    broken = hetero(place, "run", "--image", str(path), "--", "/bin/true")
    assert broken.returncode not in (0, 127)
    assert "digest" in broken.stderr


def test_doctor_tries_every_tier(place: Path) -> None:
    told = json.loads(hetero(place, "doctor", "--json").stdout)
    found = {check["name"]: check for check in told["checks"]}
    for tier in ("landlock", "bwrap", "gvisor", "microvm"):
        check = found[f"tier_{tier}"]
        assert check["needed"] is False
        assert check["ok"] or (check["cause"] and check["fix"])
