"""The file tree of a box: overlay layers, read-only binds, a small /dev, its own /proc; nothing else of the
host.

Runs in the box's first process, in its new user and mount namespaces. Paths given to the overlay are short
relative names, because the options of a mount can be read inside. The tree becomes the root before anything
is made or mounted in it: a link in an image leads to where it leads for the box, never to the host.
"""

from __future__ import annotations

import os

from hetero.sandbox.launcher import kernel as k

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEV_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


def build(spec: dict[str, Any], sources: list[int]) -> int:
    """Mount the tree of `spec` and make it the root; a descriptor of its upper layer. Raises OSError.

    `sources`: descriptors of what spec["binds"] names, opened by whoever wants it shown: the box's user may
    lack the way there, such as root's home.
    """
    k.mount("none", "/", flags=k.MS_REC | k.MS_PRIVATE)
    sources = [k.pick_up(source) for source in sources]
    devices = [k.pick_up(os.open(f"/dev/{name}", os.O_PATH), recursive=False) for name in _DEVICES]
    os.chdir(spec["dir"])
    upper = os.open(_overlay(spec), os.O_RDONLY | os.O_DIRECTORY)
    os.chdir("root")
    _proc(spec)
    if "root" in spec["weaken"]:
        _make("mnt", True)
        k.bind("/", "mnt")
    k.enter_root(".")
    _prepare(spec)
    _pin_writable(spec)
    for source, (_, target) in zip(sources, spec["binds"], strict=True):
        k.put_down(source, target.lstrip("/"))
        k.set_mount(target.lstrip("/"), k.ATTR_RDONLY | k.ATTR_NOSUID | k.ATTR_NODEV)
    _dev(spec, devices)
    _permissions(spec)
    return upper


def _proc(spec: dict[str, Any]) -> None:
    """The box's /proc; only while the host's is in sight does the kernel let it be mounted."""
    if not os.path.lexists("proc"):
        os.mkdir("proc")
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    place = k.openat2(here, "proc", os.O_PATH | os.O_DIRECTORY, 0, k.RESOLVE_IN_ROOT)
    if "proc" in spec["weaken"]:
        k.bind("/proc", f"/proc/self/fd/{place}")
    else:
        flags = k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC
        k.mount("proc", f"/proc/self/fd/{place}", "proc", flags)
    os.close(place)
    os.close(here)


def _overlay(spec: dict[str, Any]) -> str:
    upper = ""
    if spec["upper"] == "tmpfs":
        os.makedirs("t", exist_ok=True)
        size = f"size={spec['disk_bytes']},nr_inodes={spec['inodes']},mode=755"
        k.mount("tmpfs", "t", "tmpfs", k.MS_NOSUID | k.MS_NODEV, size)
        upper = "t/"
    for name in (upper + "u", upper + "w", "root"):
        os.makedirs(name, exist_ok=True)
    names = []
    for index, layer in enumerate(spec["layers"]):
        link = f"l{index}"
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink(layer, link)
        names.append(layer if "names" in spec["weaken"] else link)
    options = f"lowerdir={':'.join(names)},upperdir={upper}u,workdir={upper}w,userxattr,volatile"
    if len(options) > 4095:
        raise OSError(7, f"{len(names)} layers are too many for one mount; flatten the snapshot")
    k.mount("overlay", "root", "overlay", k.MS_NOSUID | k.MS_NODEV, options)
    return upper + "u"


def _prepare(spec: dict[str, Any]) -> None:
    """Mount points that the layers lack. They show in the upper layer, and are told from changes by name."""
    for source, target in spec["binds"]:
        _make(target.lstrip("/"), os.path.isdir(source))
    for name in ("dev", *(path.lstrip("/") for path in spec["writable"] if path != "/")):
        _make(name, True)


def _make(name: str, directory: bool) -> None:
    if os.path.lexists(name):
        return
    os.makedirs(name if directory else os.path.dirname(name) or ".", exist_ok=True)
    if not directory:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o644))


def _dev(spec: dict[str, Any], devices: list[int]) -> None:
    k.mount("tmpfs", "dev", "tmpfs", k.MS_NOSUID, "size=64k,nr_inodes=64,mode=755")
    for name, device in zip(_DEVICES, devices, strict=True):
        os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        k.put_down(device, f"dev/{name}")
    for name, target in _DEV_LINKS.items():
        os.symlink(target, f"dev/{name}")
    os.mkdir("dev/shm", 0o1777)
    os.mkdir("dev/pts", 0o755)
    safe = k.MS_NOSUID | k.MS_NODEV
    k.mount("tmpfs", "dev/shm", "tmpfs", safe, f"size={spec['shm_bytes']},nr_inodes=4096,mode=1777")
    k.mount("devpts", "dev/pts", "devpts", k.MS_NOSUID, "newinstance,ptmxmode=0666,mode=600")
    k.set_mount("dev", k.ATTR_RDONLY, recursive=False)


def _pin_writable(spec: dict[str, Any]) -> None:
    """Make each writable path a mount of its own, before others are mounted inside it."""
    paths = [path.strip("/") for path in spec["writable"]]
    if "" not in paths:
        for path in sorted(paths):
            k.bind(path, path)


def _permissions(spec: dict[str, Any]) -> None:
    """The root read-only but for the writable paths; protected ones read-only inside those.

    Each is a mount of its own, so it can be neither renamed nor replaced; the directories between a writable
    path and a protected one below it are pinned in the same way.
    """
    writable = [path.strip("/") for path in spec["writable"]]
    if "" not in writable:
        k.set_mount(".", k.ATTR_RDONLY, recursive=False)
    if "protect" in spec["weaken"]:
        return
    for path in (path.strip("/") for path in spec["protected"]):
        if not os.path.lexists(path):
            continue
        if os.path.islink(path):
            raise OSError(40, f"the protected path /{path} is a symbolic link; name what it points to")
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if any(above.startswith(f"{root}/") if root else True for root in writable):
                k.bind(above, above, recursive=True)
        k.bind(path, path)
        k.set_mount(path, k.ATTR_RDONLY)
