"""Finds an image's manifest, configuration and layers in a directory or an archive."""

from __future__ import annotations

import json
import os
import platform
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from hetero.sandbox.errors import ImageError
from hetero.sandbox.oci.limits import Hashed

_LARGEST_JSON = 4 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_DEEPEST = 3


@dataclass(frozen=True)
class Blob:
    """A layer: where it is; its SHA-256 as it lies there, "" if it is not told; that of its tar stream."""

    name: str
    digest: str
    diff: str


@dataclass(frozen=True)
class Found:
    """An image. `layers`: oldest first. `env`: of its configuration."""

    layers: tuple[Blob, ...]
    env: tuple[tuple[str, str], ...]


class Files(Protocol):
    """Where an image's files are."""

    def open(self, name: str) -> IO[bytes]:
        """A file. Raises KeyError if there is none."""

    def has(self, name: str) -> bool:
        """Whether there is that file."""


class _Directory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        if ".." in name.split("/") or name.startswith("/"):
            raise KeyError(name)
        try:
            return open(self._path / name, "rb")
        except OSError:
            raise KeyError(name) from None

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()


class _Archive:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._names = {os.path.normpath(member.name): member for member in archive}

    def open(self, name: str) -> IO[bytes]:
        found = self._archive.extractfile(self._names[os.path.normpath(name)])
        if found is None:
            raise KeyError(name)
        return found

    def has(self, name: str) -> bool:
        return name in self._names


@contextmanager
def opened(path: Path) -> Iterator[Files]:
    """The files of an image. Raises ImageError for what is neither a directory nor a tar archive."""
    if path.is_dir():
        yield _Directory(path)
        return
    try:
        with tarfile.open(path) as archive:
            yield _Archive(archive)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ImageError(f"The image {path} is no readable archive: {error}.") from error


def find(files: Files, ref: str | None = None) -> Found:
    """The image for this machine in a layout or a `docker save` archive; `ref` chooses among several. Raises
    ImageError."""
    try:
        if files.has("index.json"):
            return _of_manifest(files, _choose(files, json.loads(_small(files, "index.json")), ref, _DEEPEST))
        if files.has("manifest.json"):
            return _of_docker(files, json.loads(_small(files, "manifest.json")), ref)
    except KeyError as error:
        raise ImageError(f"The image lacks {error}.", "Fetch it again.") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(f"The image's description cannot be read: {error}.") from error
    raise ImageError(
        "There is neither index.json nor manifest.json: this is no OCI layout and no `docker save` archive.",
        "Make one with `skopeo copy docker://NAME oci:DIR` or `docker save NAME -o FILE`.",
    )


def _small(files: Files, name: str, digest: str = "") -> bytes:
    with files.open(name) as file:
        reader = Hashed(file, _LARGEST_JSON, name)
        parts = []
        while part := reader.read():
            parts.append(part)
    if digest:
        reader.check(digest)
    return b"".join(parts)


def _hex(digest: Any) -> str:
    found = _DIGEST.fullmatch(str(digest))
    if found is None:
        raise ImageError(f"The digest {str(digest)[:80]!r} is no sha256: with 64 hex digits.")
    return found[1]


def _blob(files: Files, description: dict[str, Any]) -> Any:
    digest = _hex(description["digest"])
    return json.loads(_small(files, f"blobs/sha256/{digest}", digest))


def _choose(files: Files, index: dict[str, Any], ref: str | None, depth: int) -> Any:
    """The manifest for this machine; an index may lead to another."""
    machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = []
    for entry in index["manifests"]:
        place = entry.get("platform") or {}
        named = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name")
        if place.get("architecture", machine) == machine and place.get("os", "linux") == "linux":
            fitting.append((named, entry))
    if ref is not None and any(named is not None for named, _ in fitting):
        fitting = [(named, entry) for named, entry in fitting if named == ref]
    if len(fitting) != 1:
        names = ", ".join(str(named) for named, _ in fitting) or "none"
        raise ImageError(
            f"The image has {len(fitting)} manifests for linux/{machine} ({names}); one is needed.",
            "Choose one with oci_image(path, ref=...), or save a single image.",
        )
    found = _blob(files, fitting[0][1])
    if "manifests" not in found:
        return found
    if depth == 0:
        raise ImageError("The image's indexes are nested too deep.")
    return _choose(files, found, ref, depth - 1)


def _of_manifest(files: Files, manifest: dict[str, Any]) -> Found:
    config = _blob(files, manifest["config"])
    digests = [_hex(layer["digest"]) for layer in manifest["layers"]]
    return _found([(f"blobs/sha256/{digest}", digest) for digest in digests], config)


def _of_docker(files: Files, images: list[dict[str, Any]], ref: str | None) -> Found:
    if ref is not None:
        images = [image for image in images if ref in (image.get("RepoTags") or ())]
    if len(images) != 1:
        raise ImageError(f"The archive has {len(images)} images to choose from; one is needed.")
    config = json.loads(_small(files, str(images[0]["Config"])))
    return _found([(str(name), "") for name in images[0]["Layers"]], config)


def _found(layers: list[tuple[str, str]], config: dict[str, Any]) -> Found:
    diffs = [_hex(digest) for digest in config["rootfs"]["diff_ids"]]
    if len(diffs) != len(layers):
        raise ImageError(f"The image lists {len(layers)} layers and {len(diffs)} digests for them.")
    rows = (config.get("config") or {}).get("Env") or []
    env = tuple((name, value) for name, _, value in (str(row).partition("=") for row in rows) if name)
    blobs = (Blob(name, digest, diff) for (name, digest), diff in zip(layers, diffs, strict=True))
    return Found(tuple(blobs), env)
