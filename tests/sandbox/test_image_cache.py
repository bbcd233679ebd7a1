"""Unpacked layers: which compressions are read, who keeps them, and when they go."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import sandbox_gc
from hetero.sandbox.errors import ImageError
from hetero.sandbox.image import oci_image
from hetero.sandbox.oci import cache, limits
from hetero.sandbox.sandbox import Sandbox
from tests.sandbox import test_images as images

ROOT = Path(__file__).resolve().parents[2]
BIG = bytes(range(256)) * 20_000


def zstd_module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that reads zstd; where the standard library has none, its backport stands for it."""
    if name == "compression.zstd" and sys.version_info < (3, 14):
        backport = pytest.importorskip("backports.zstd")
        monkeypatch.setitem(sys.modules, name, backport)
        return backport
    module = pytest.importorskip(name)
    monkeypatch.setattr(limits, "_ZSTD", (name,))
    return module


@pytest.mark.parametrize("name", ["compression.zstd", "zstandard"])
def test_zstd_layers(name: str, host_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = zstd_module(name, monkeypatch)
    compress = module.compress

    def pack(data: bytes) -> bytes:
        """Two frames, and before each one that is to be skipped: what registries serve in parts."""
        note = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
        return bytes(note + compress(data[:1000]) + note + compress(data[1000:]))

    image = oci_image(images.layout(host_dir / "a", [images.layer(images.entry("big", BIG))], pack))
    assert (Path(image.layers[0]) / "big").read_bytes() == BIG
    for number, broken in enumerate(
        (lambda d: pack(d)[:-9], lambda d: pack(d)[:60] + b"?" * 60 + pack(d)[120:])
    ):
        rows = [images.layer(images.entry("other", BIG + bytes([number])))]
        with pytest.raises(ImageError, match=r"zstd stream is broken|has SHA-256|cannot be unpacked"):
            oci_image(images.layout(host_dir / f"b{number}", rows, broken))
    bomb = images.layout(host_dir / "c", [images.layer(images.entry("bomb", bytes(40 << 20)))], pack)
    with pytest.raises(ImageError, match="larger than"):
        oci_image(bomb, limits=limits.ImageLimits(bytes=1 << 20))


def test_zstd_without_a_reader_is_refused(host_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(limits.importlib, "import_module", missing)
    path = images.layout(host_dir / "a", [images.rootfs()], lambda data: b"\x28\xb5\x2f\xfd" + data)
    with pytest.raises(ImageError, match=r"zstd.*Python 3.14 or the package zstandard"):
        oci_image(path)
    assert importlib.import_module is missing  # it was asked


def age(layer: str, days: float) -> None:
    """Let a layer have been used so long ago."""
    then = time.time() - days * 86_400
    os.utime(f"{layer}.used", (then, then))


def elsewhere(host_dir: Path, name: str) -> tuple[str, subprocess.Popen[str]]:
    """A layer that another process uses until its input ends."""
    path = images.layout(host_dir / name, [images.layer(images.entry("mine", name.encode()))])
    code = "import sys\nfrom hetero.sandbox import oci_image\n"
    code += f"print(oci_image({str(path)!r}).layers[0], flush=True)"
    user = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nsys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert user.stdout is not None
    return user.stdout.readline().strip(), user


def end(user: subprocess.Popen[str]) -> None:
    user.communicate()


def test_layers_that_nobody_uses_go(host_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer, user = elsewhere(host_dir, "a")
    age(layer, 40)
    assert Path(layer).name not in cache.collect(0)  # in use
    end(user)
    age(layer, 29)
    sandbox_gc.run(30, as_json=True)
    assert Path(layer).is_dir()
    age(layer, 31)
    sandbox_gc.run(30, as_json=True)
    assert Path(layer).name in capsys.readouterr().out
    assert not Path(layer).exists()
    assert not Path(f"{layer}.used").exists()
    again, user = elsewhere(host_dir, "b")  # a layer with a new time stamp
    end(user)
    age(again, 40)
    oci_image(host_dir / "b")
    assert cache.collect(86_400) == []
    assert Path(again).is_dir()


def test_a_layer_that_this_process_uses_stays(host_dir: Path) -> None:
    image = oci_image(images.layout(host_dir / "a", [images.rootfs()]))
    age(image.layers[0], 400)
    cache.collect(0)
    with Sandbox.create(image) as box:
        assert box.exec("echo here").stdout == "here\n"


def test_an_image_whose_layers_are_gone_is_refused(host_dir: Path) -> None:
    layer, user = elsewhere(host_dir, "a")
    end(user)
    gone = Path(layer).rename(f"{layer}.part")
    from_another = images.Image(layers=(layer,), host=False)
    with pytest.raises(ImageError, match=r"layer .* is gone.*Load the image again"):
        Sandbox.create(from_another)
    os.utime(gone, (0, 0))
    assert gone.name in cache.collect(1e9)  # what a killed unpacking leaves
    assert not gone.exists()
    fresh = cache.directory() / "fresh.part"
    fresh.mkdir()
    assert cache.collect(0) == []
    fresh.rmdir()
