"""What a box's file tree starts from."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from hetero.sandbox.errors import ImageError
from hetero.sandbox.oci.limits import ImageLimits
from hetero.sandbox.oci.load import load
from hetero.sandbox.store import Run, give

_HOST_BINDS = ("/usr",)
_HOST_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_HOST_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime")


@dataclass(frozen=True)
class Image:
    """Layers and binds.

    Attributes:
        layers: directories, newest first; shared by all boxes and never written to.
        binds: (host path, path inside), shown read-only.
        host: the host's /usr and a minimal /etc below the layers.
        workspace: a directory whose files are copied, once per owner, to /workspace.
        env: environment that its programs expect, as an OCI image names it.
        template: what a remote service (the tier microvm) starts from; nothing of this machine then.
    """

    layers: tuple[str, ...] = ()
    binds: tuple[tuple[str, str], ...] = ()
    host: bool = True
    workspace: str = ""
    env: tuple[tuple[str, str], ...] = ()
    template: str = ""


def host_image() -> Image:
    """The host's programs (/usr), read-only, and nothing else of it."""
    return Image()


def path_image(path: str | Path) -> Image:
    """An OCI layout or archive; a root file system (has bin or usr/bin); or else a directory that becomes
    /workspace over the host image.

    Raises ImageError if there is nothing, or what is there cannot be read.
    """
    root = Path(path).expanduser().absolute()
    if root.is_file() or (root / "oci-layout").is_file():
        return oci_image(root)
    if not root.is_dir():
        raise ImageError(
            f"The image {path} is neither a directory nor a file.", "Name a directory or an OCI archive."
        )
    if (root / "bin").exists() or (root / "usr/bin").exists():
        return Image(layers=(str(root),), host=False)
    return Image(workspace=str(root))


def oci_image(path: str | Path, ref: str | None = None, limits: ImageLimits | None = None) -> Image:
    """An OCI image layout, an archive of one, or what `docker save` wrote. Layers are unpacked into the store
    once; digests are checked. Entry point, user and working directory of its configuration are not used.

    Args:
        ref: which image, if there are several: its ref.name annotation, or its tag in a docker archive.
        limits: how large it may be.

    Raises ImageError.
    """
    layers, env = load(Path(path).expanduser().absolute(), ref, limits)
    return Image(layers=layers, host=False, env=env)


def python_image() -> Image:
    """The host image, with this interpreter's installation and virtual environment at their own paths."""
    places = dict.fromkeys((sys.base_prefix, sys.prefix))
    return Image(binds=tuple((place, place) for place in places if not place.startswith("/usr")))


def as_image(image: Image | str | Path | None) -> Image:
    """An image of what a caller gave."""
    if image is None or image == "host":
        return host_image()
    return image if isinstance(image, Image) else path_image(image)


def host_binds(image: Image) -> list[tuple[str, str]]:
    """All read-only binds of an image."""
    usual = [(path, path) for path in _HOST_BINDS] if image.host else []
    for source, _ in image.binds:
        if not os.path.lexists(source):
            raise ImageError(f"The image binds {source}, which does not exist.")
    return [*usual, *image.binds]


_making = threading.Lock()


def skeleton(run: Run, image: Image, directories: tuple[str, ...], uid: int) -> str:
    """The lowest layer: mount points, and a minimal /etc for the host image. Made once per kind."""
    with _making:
        return _skeleton(run, image, directories, uid)


def _skeleton(run: Run, image: Image, directories: tuple[str, ...], uid: int) -> str:
    key = repr((image.host, image.binds, directories, uid)).encode()
    path = run.path / "skeletons" / hashlib.sha256(key).hexdigest()[:16]
    if path.exists():
        return str(path)
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for name in ("proc", "dev", "tmp", "workspace", "home/agent", "etc", "run", *directories):
        (part / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for source, target in host_binds(image):
        inside = part / target.lstrip("/")
        if os.path.isdir(source):
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
    if image.host:
        _host_etc(part, uid)
    for here, folders, files in os.walk(part):
        for name in (*folders, *files):
            give(os.path.join(here, name))
    give(part)
    (part / "tmp").chmod(0o1777)
    part.rename(path)
    return str(path)


def _host_etc(part: Path, uid: int) -> None:
    for name, target in _HOST_LINKS.items():
        if os.path.islink("/" + name):
            (part / name).symlink_to(target)
    etc = part / "etc"
    for source in _HOST_FILES:
        if os.path.isdir(source):
            shutil.copytree(source, etc / os.path.basename(source), symlinks=True)
        elif os.path.exists(source):
            shutil.copyfile(source, etc / os.path.basename(source))
    user = f"agent:x:{uid}:{uid}:agent:/home/agent:/bin/bash\n" if uid else ""
    (etc / "passwd").write_text(
        f"root:x:0:0:root:/root:/bin/sh\n{user}nobody:x:65534:65534:nobody:/:/bin/false\n"
    )
    group = f"agent:x:{uid}:\n" if uid else ""
    (etc / "group").write_text(f"root:x:0:\n{group}nogroup:x:65534:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (etc / "gitconfig").write_text("[safe]\n\tdirectory = *\n[gc]\n\tauto = 0\n")


def workspace_layer(run: Run, source: str) -> str:
    """A layer that holds a copy of `source` at /workspace, owned by the boxes' user. Made once per owner."""
    with _making:
        return _workspace_layer(run, source)


def _workspace_layer(run: Run, source: str) -> str:
    path = run.path / "layers" / ("w" + hashlib.sha256(source.encode()).hexdigest()[:16])
    if path.exists():
        return str(path)
    part = path.with_name(path.name + ".part")
    try:
        shutil.copytree(source, part / "workspace", symlinks=True)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ImageError(f"The image directory {source} cannot be copied: {error}.") from error
    for here, folders, files in os.walk(part):
        for name in (*folders, *files):
            give(os.path.join(here, name))
    give(part)
    part.rename(path)
    return str(path)
