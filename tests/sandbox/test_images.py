"""OCI images: honest ones run, hostile ones stay where they are put."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero.sandbox.errors import ImageError
from hetero.sandbox.image import Image, as_image, oci_image
from hetero.sandbox.oci.limits import ImageLimits
from hetero.sandbox.oci.unpack import Layer
from hetero.sandbox.policy import Policy
from hetero.sandbox.sandbox import Sandbox

Make = Callable[..., Sandbox]
Pack = Callable[[bytes], bytes]
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def entry(name: str, data: bytes | None = None, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One member: a file with `data`, else what the fields say."""
    found = tarfile.TarInfo(name)
    found.size, found.mode, found.mtime = len(data or b""), 0o644, 1_000_000
    for field, value in fields.items():
        setattr(found, field, value)
    return found, data or b""


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A tar stream."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in entries:
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def layout(path: Path, layers: Sequence[bytes], pack: Pack = gzip.compress, env: Sequence[str] = ()) -> Path:
    """An OCI image layout."""
    blobs = path / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": "x"}

    config = {
        "rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(each).hexdigest() for each in layers]},
        "config": {"Env": list(env)},
    }
    rows = [put(pack(each)) for each in layers]
    manifest = {"config": put(json.dumps(config).encode()), "layers": rows}
    described = {
        **put(json.dumps(manifest).encode()),
        "platform": {"os": "linux", "architecture": ARCHITECTURE},
    }
    other = {**described, "platform": {"os": "linux", "architecture": "riscv64"}}
    (path / "index.json").write_text(json.dumps({"manifests": [other, described]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path


def docker_archive(path: Path, layers: Sequence[bytes]) -> Path:
    """What `docker save` writes."""
    config = {"rootfs": {"diff_ids": ["sha256:" + hashlib.sha256(each).hexdigest() for each in layers]}}
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    files = {"c.json": json.dumps(config).encode(), **dict(zip(names, layers, strict=True))}
    described = [{"Config": "c.json", "RepoTags": ["tiny:1"], "Layers": names}]
    files["manifest.json"] = json.dumps(described).encode()
    path.write_bytes(layer(*(entry(name, data) for name, data in files.items())))
    return path


def rootfs() -> bytes:
    """A root file system with bash, env and cat of this machine."""
    rows = [folder("usr"), folder("usr/bin"), folder("etc"), entry("etc/issue", b"tiny")]
    rows += [link(name, f"usr/{name}") for name in ("bin", "lib", "lib64")]
    done: set[str] = set()
    for program in ("bash", "cat", "env"):
        path = f"/usr/bin/{program}"
        rows.append(entry(path[1:], Path(path).read_bytes(), mode=0o755))
        for library in os.popen(f"ldd {path}").read().split():
            if library.startswith("/"):
                place = (
                    os.path.realpath(os.path.dirname(library)).lstrip("/") + "/" + os.path.basename(library)
                )
                if place not in done:
                    done.add(place)
                    rows.append(entry(place, Path(library).read_bytes(), mode=0o755))
    return layer(*rows)


def shown(image: Image) -> dict[str, str]:
    """Path -> type and mode of everything in an image of one layer."""
    (single,) = image.layers
    rows = []
    for here, folders, files in os.walk(single):
        for name in (*folders, *files):
            path = os.path.join(here, name)
            mode = os.lstat(path).st_mode
            rows.append((os.path.relpath(path, single), stat.filemode(mode)))
    return dict(rows)


def test_a_layout_runs_with_its_environment(make_box: Make, host_dir: Path) -> None:
    path = layout(
        host_dir / "image",
        [
            rootfs(),
            layer(
                entry("etc/.wh.issue"), entry("srv/deep/new", b"second"), link("etc/also", "../srv/deep/new")
            ),
        ],
        env=["PATH=/usr/bin", "KIND=tiny"],
    )
    box = make_box(image=path)
    assert box.exec("cat /srv/deep/new; env").stdout.startswith("second")
    assert "KIND=tiny" in box.exec("env").stdout
    assert box.exec("cat /etc/also").stdout == "second"
    assert box.exec("cat /etc/issue").exit == 1
    assert box.exec("echo x > /srv/deep/new").exit != 0
    assert box.exec("echo mine > f; cat f").stdout == "mine\n"
    assert box.exec("cat /root/.bashrc /etc/hostname").exit == 1
    (kid,) = box.fork(1)
    assert kid.exec("cat f /srv/deep/new").stdout == "mine\nsecond"
    kid.close()


def test_archives_are_read_like_directories(host_dir: Path) -> None:
    layers = [layer(folder("bin"), entry("bin/a", b"1")), layer(entry("bin/b", b"2"))]
    wanted = as_image(layout(host_dir / "dir", layers)).layers
    archive = host_dir / "oci.tar"
    with tarfile.open(archive, "w") as file:
        file.add(host_dir / "dir", ".")
    assert as_image(archive).layers == wanted
    assert as_image(docker_archive(host_dir / "docker.tar", layers)).layers == wanted
    assert oci_image(host_dir / "docker.tar", ref="tiny:1").layers == wanted
    assert as_image(layout(host_dir / "plain", layers, pack=bytes)).layers == wanted
    with pytest.raises(ImageError, match="one is needed"):
        oci_image(host_dir / "docker.tar", ref="other:1")


def test_layers_are_unpacked_once(host_dir: Path) -> None:
    path = layout(host_dir / "image", [layer(entry("once", os.urandom(8)))])
    (made,) = oci_image(path).layers
    before = os.lstat(f"{made}/once").st_ino
    for blob in (path / "blobs/sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.unlink()
    assert oci_image(path).layers == (made,)
    assert os.lstat(f"{made}/once").st_ino == before


def test_whiteouts_and_opaque_directories(make_box: Make, host_dir: Path) -> None:
    base = [folder("d"), entry("d/old", b"1"), entry("d/keep", b"1"), folder("o"), entry("o/old", b"1")]
    path = layout(
        host_dir / "image",
        [
            rootfs(),
            layer(*base, entry("file", b"1"), folder("gone"), entry("gone/x", b"1"), folder("swap/in")),
            layer(
                entry("d/.wh.old"),
                entry("o/new", b"2"),
                entry("o/.wh..wh..opq"),
                entry(".wh.gone"),
                entry(".wh.file"),
                folder("file"),
                entry("file/inside", b"2"),
                folder("swap"),
                entry("swap/.wh.in"),
                folder("swap/in"),
                entry(".wh..wh.aufs"),
            ),
        ],
    )
    box = make_box(image=path)
    listed = "cd /; for f in d/* o/* gone gone/* file/* swap/* swap/in/*; do [ -e $f ] && echo $f; done; true"
    assert box.exec(listed).stdout.split() == ["d/keep", "o/new", "file/inside", "swap/in"]


def test_hard_links_and_modes(host_dir: Path) -> None:
    path = layout(
        host_dir / "image",
        [
            layer(
                entry("a", b"data", mode=0o6755),
                link("b", "a", tarfile.LNKTYPE),
                folder("dir", mode=0o2500),
                entry("dir/in", b"x"),
                entry("fifo", type=tarfile.FIFOTYPE),
                entry("disk", type=tarfile.BLKTYPE, devmajor=8),
                entry("null", type=tarfile.CHRTYPE),
            )
        ],
    )
    image = oci_image(path)
    assert shown(image) == {
        "a": "-rwxr-xr-x",
        "b": "-rwxr-xr-x",
        "dir": "drwx------",
        "dir/in": "-rw-r--r--",
        "fifo": "prw-r--r--",
    }
    assert os.path.samefile(f"{image.layers[0]}/a", f"{image.layers[0]}/b")
    assert os.lstat(f"{image.layers[0]}/a").st_mtime == 1_000_000


# Pythons before 3.12 trust without being told to; some of them cannot be told.
_TRUSTING: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


def _images(store: Path) -> list[str]:
    """Every name below the store's unpacked layers."""
    return sorted(str(path) for path in (store / "images").rglob("*"))


HOSTILE = {
    "a name that climbs": [entry("../../planted", b"x")],
    "an absolute name": [entry("/planted", b"x")],
    "a name that climbs from inside": [folder("a"), entry("a/../../planted", b"x")],
    "a file below a link that leads out": [link("out", "{host}"), entry("out/planted", b"x")],
    "a file below a link that climbs": [
        link("out", "../../../../../../../..{host}"),
        entry("out/planted", b"x"),
    ],
    "a directory over a chain of links": [link("a", "b"), link("b", "{host}"), folder("a/planted")],
    "a hard link to the host": [link("planted", "../../../../../../..{host}/secret", tarfile.LNKTYPE)],
    "a hard link through a link": [link("d", "{host}"), link("planted", "d/secret", tarfile.LNKTYPE)],
    "a hard link to nothing": [link("planted", "nothing", tarfile.LNKTYPE)],
    "a deletion that climbs": [link("out", "{host}"), entry("out/.wh.secret")],
    "a deletion of the directory": [entry("a/.wh...")],
    "a deletion of the root": [entry(".wh..wh..opq")],
    "a file below a file": [entry("a", b"x"), entry("a/planted", b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layers_are_refused(name: str, host_dir: Path, store: Path) -> None:
    (host_dir / "secret").write_text("of the host")
    host_dir.chmod(0o777)
    rows = []
    for member, data in HOSTILE[name]:
        found = entry(member.name, data, type=member.type, linkname=member.linkname.format(host=host_dir))
        rows.append(found)
    path = layout(host_dir / "image", [layer(*rows)])
    before = _images(store)
    with pytest.raises(ImageError):
        oci_image(path)
    assert sorted(os.listdir(host_dir)) == ["image", "secret"]
    assert _images(store) == before
    assert not Path("/planted").exists()


@pytest.mark.parametrize(
    "name", ["a file below a link that leads out", "a hard link to the host", "a deletion that climbs"]
)
def test_19_a_trusting_unpacker_lets_hostile_layers_out(
    name: str, host_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: with the tar file believed, the same layers reach the host's files."""

    def trusting(self: Layer, stream: Any) -> None:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(self._target, **_TRUSTING)
        reached.extend(path for path in self._target.rglob("planted") if path.samefile(secret))

    reached: list[Path] = []
    secret = host_dir / "secret"
    secret.write_text("of the host")
    monkeypatch.setattr(Layer, "unpack", trusting)
    rows = [
        entry(member.name, data, type=member.type, linkname=member.linkname.format(host=host_dir))
        for member, data in HOSTILE[name]
    ]
    if rows[-1][0].islnk():  # what tar itself makes relative to the place of unpacking
        rows[-1][0].linkname = str(secret)
    oci_image(layout(host_dir / "image", [layer(*rows)]))
    planted = [path for path in host_dir.iterdir() if path.name not in ("image", "secret")]
    assert planted or reached


def test_links_that_lead_out_lead_to_the_box(make_box: Make, host_dir: Path) -> None:
    (host_dir / "secret").write_text("of the host")
    rows = [link("leak", f"{host_dir}/secret"), link("srv", "/"), link("opt", "../../../../../..")]
    box = make_box(image=layout(host_dir / "image", [rootfs(), layer(*rows)]))
    assert box.exec("cat /leak").exit == 1
    assert box.exec("cat /srv/etc/issue /opt/etc/issue").stdout == "tinytiny"


@pytest.mark.parametrize("place", ["workspace", "proc", "dev", "home", "tmp", "etc"])
def test_a_link_where_the_box_has_its_mounts_never_leads_to_the_host(
    place: str, make_box: Make, host_dir: Path
) -> None:
    host_dir.chmod(0o777)
    rows = [link(place, str(host_dir))]
    image = layout(host_dir / "image", [rootfs(), layer(entry(f".wh.{place}"), *rows)])
    before = sorted(os.listdir(host_dir))
    try:
        box = make_box(image=image)
        box.exec("echo x > /tmp/x; echo y > /workspace/y; mkdir -p /home/agent/z")
    except Exception as error:
        assert "could not be made" in str(error)  # noqa: PT017
    assert sorted(os.listdir(host_dir)) == before


def test_a_box_that_replaces_its_directories_restarts_inside(make_box: Make, host_dir: Path) -> None:
    host_dir.chmod(0o777)
    box = make_box(policy=Policy(writable=("/",)))
    assert box.exec(f"mv /home /home2 && ln -s {host_dir} /home").ok
    try:
        box.snapshot().close()
    except Exception as error:
        assert "could not be made" in str(error)  # noqa: PT017
    assert os.listdir(host_dir) == []


def test_damaged_and_changed_images_are_refused(host_dir: Path) -> None:
    good = layer(entry("f", os.urandom(2000)))
    path = layout(host_dir / "a", [good])
    for blob in (path / "blobs/sha256").iterdir():
        data = blob.read_bytes()
        spoiled = host_dir / "spoiled"
        shutil.copytree(path, spoiled)
        (spoiled / "blobs/sha256" / blob.name).write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(ImageError):
            oci_image(spoiled)
        (spoiled / "blobs/sha256" / blob.name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ImageError):
            oci_image(spoiled)
        (spoiled / "blobs/sha256" / blob.name).unlink()
        with pytest.raises(ImageError, match="lacks"):
            oci_image(spoiled)
        shutil.rmtree(spoiled)
    # The manifest names a layer honestly, but the configuration names another tar stream for it.
    other = layout(host_dir / "b", [good])
    index = json.loads((other / "index.json").read_text())
    manifest = json.loads((other / "blobs" / index["manifests"][1]["digest"].replace(":", "/")).read_text())
    config = (other / "blobs" / manifest["config"]["digest"].replace(":", "/")).read_bytes()
    lie = config.replace(hashlib.sha256(good).hexdigest().encode(), b"0" * 64)
    archive = host_dir / "lie.tar"
    rows = [{"Config": "c.json", "Layers": ["l.tar"]}]
    archive.write_bytes(
        layer(entry("c.json", lie), entry("l.tar", good), entry("manifest.json", json.dumps(rows).encode()))
    )
    with pytest.raises(ImageError, match="SHA-256"):
        oci_image(archive)
    (host_dir / "nothing").mkdir()
    (host_dir / "nothing/oci-layout").write_text("{}")
    with pytest.raises(ImageError, match="no OCI layout"):
        as_image(host_dir / "nothing")
    (host_dir / "text").write_text("no archive")
    with pytest.raises(ImageError, match="no readable archive"):
        as_image(host_dir / "text")


def test_bombs_are_stopped(host_dir: Path) -> None:
    zeros = layer(entry("zeros", bytes(50_000_000)))
    path = layout(host_dir / "zip", [zeros])
    with pytest.raises(ImageError, match="larger than 1000000 bytes"):
        oci_image(path, limits=ImageLimits(bytes=1_000_000))
    assert (Path(oci_image(path).layers[0]) / "zeros").stat().st_size == 50_000_000
    many = layout(host_dir / "many", [layer(*(entry(f"f{number}") for number in range(600)))])
    with pytest.raises(ImageError, match="more than 500 entries"):
        oci_image(many, limits=ImageLimits(entries=500))
    two = [layer(entry("a", os.urandom(600_000))), layer(entry("b", os.urandom(600_000)))]
    with pytest.raises(ImageError, match="larger"):
        oci_image(layout(host_dir / "sum", two), limits=ImageLimits(bytes=1_000_000))
    header = layer(entry("x", b"", pax_headers={"comment": "y" * (2 << 20)}))
    with pytest.raises(ImageError, match="extended header"):
        oci_image(layout(host_dir / "pax", [header]))
    large = layer(entry("sparse", b""))
    with pytest.raises(ImageError):  # says that it has 8 GB, and ends
        oci_image(layout(host_dir / "lie", [_with_size(large, 8 << 30)]))


def _with_size(stream: bytes, size: int) -> bytes:
    """The first member says that it is that large."""
    head = bytearray(stream[:512])
    head[124:136] = f"{size:011o}\0".encode()
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return bytes(head) + stream[512:]


def test_extended_attributes_of_overlay_are_not_taken(host_dir: Path) -> None:
    marks = {f"SCHILY.xattr.{name}": "/etc" for name in ("user.overlay.redirect", "user.overlay.metacopy")}
    (made,) = oci_image(layout(host_dir / "image", [layer(entry("f", b"x", pax_headers=marks))])).layers
    assert os.listxattr(f"{made}/f") == []
