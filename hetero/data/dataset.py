"""Data sets: rows with a place each, from a file, a generator of ours or the Hugging Face hub."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, overload

from hetero.data.arithmetic import arithmetic
from hetero.data.files import Located, Row, read_rows
from hetero.data.instructions import instructions
from hetero.data.shell import shell
from hetero.errors import DataError, UnavailableError

GENERATORS: dict[str, Callable[..., list[Row]]] = {
    "arithmetic": arithmetic,
    "instructions": instructions,
    "shell": shell,
}
"""Name -> generator(split, **options) of rows. Rows of split "train" and of split "held_out" never share
their content."""

_SPLITS = {"held_out": ("held_out", "test", "eval", "validation", "valid", "dev")}


class Dataset(Sequence[Row]):
    """Rows in a fixed order. `where(i)` tells where row i came from, for messages.

    Raises DataError when there are no rows.
    """

    def __init__(self, rows: Iterable[Located], name: str) -> None:
        located = list(rows)
        if not located:
            raise DataError(f"The data set {name} is empty: it must have at least one row.")
        self.name = name
        self._rows = [row for row, _ in located]
        self._places = [place for _, place in located]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset: ...
    def __getitem__(self, index: int | slice) -> Row | Dataset:
        if isinstance(index, slice):
            return Dataset(zip(self._rows[index], self._places[index], strict=True), self.name)
        return self._rows[index]

    def where(self, index: int) -> str:
        """Where row `index` stands: `train.jsonl line 7`."""
        return self._places[index]

    def split(self, held_out: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """(train, held out): about the share `held_out` of the rows is kept apart, chosen by content.

        Equal rows always land on the same side, wherever they stand and whatever is added to the file.
        Raises DataError when one side is empty.
        """
        limit = held_out * 2.0**64
        apart = [_digest(row, seed) < limit for row in self._rows]
        sides: list[Dataset] = []
        for side, name in ((False, "train"), (True, "held-out")):
            rows = [
                (row, place)
                for row, place, is_apart in zip(self._rows, self._places, apart, strict=True)
                if is_apart == side
            ]
            if not rows:
                raise DataError(
                    f"Splitting {held_out} off the {len(self)} rows of {self.name} leaves the {name} side "
                    "empty."
                )
            sides.append(Dataset(rows, f"{self.name} ({name})"))
        return sides[0], sides[1]


def load_dataset(
    source: str, *, split: str = "train", options: Mapping[str, Any] | None = None, limit: int | None = None
) -> Dataset:
    """The data set that `source` names.

    Args:
        source: the name of a generator (`arithmetic`, `instructions`, `shell`); a file (see `read_rows`); a
            glob pattern of files; a directory that holds a file `<split>.jsonl` (or .json, .csv ...); or
            `hub:owner/name` for the Hugging Face hub, which needs the package `datasets` (`owner/name` alone
            does when no such file exists).
        split: `train` or `held_out` of a generator, the file in a directory, the split on the hub. For the
            latter two `held_out` also finds `test`, `eval`, `validation`, `valid` and `dev`, whichever comes
            first.
        options: arguments of the generator, or of `datasets.load_dataset` (such as `name`).
        limit: keep only the first rows.

    Raises:
        DataError: there is no such data set, it is empty, a row cannot be read, a bad option.
        UnavailableError: a package that is needed is not installed, or the hub cannot be reached.
    """
    rows, name = _find(source, split, dict(options or {}))
    data = Dataset(rows, name)
    return data if limit is None or limit >= len(data) else data[:limit]


def _find(source: str, split: str, options: dict[str, Any]) -> tuple[Iterable[Located], str]:
    if source in GENERATORS:
        return _generate(source, split, options), f"{source} ({split})"
    if source.startswith("hub:"):
        return _hub(source.removeprefix("hub:"), split, options), source
    path = Path(source).expanduser()
    files = [path] if path.exists() else [Path(file) for file in sorted(glob(str(path), recursive=True))]
    if not files:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not path.suffix:
            return _hub(source, split, options), source
        near = difflib.get_close_matches(source, GENERATORS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise DataError(
            f"There is no data set {source!r}: no file of that name (looked in {Path.cwd()}), and no "
            "generator. "
            f"{hint}Generators: {', '.join(GENERATORS)}."
        )
    if options:
        raise DataError(f"{source} is read from disk and takes no options, got {sorted(options)}.")
    files = [_in_directory(file, split) if file.is_dir() else file for file in files]
    return (located for file in files for located in read_rows(file)), source


def _generate(name: str, split: str, options: dict[str, Any]) -> Iterable[Located]:
    if split not in ("train", "held_out"):
        raise DataError(f"The generator {name} has the splits train and held_out, got {split!r}.")
    try:
        rows = GENERATORS[name](split, **options)
    except TypeError as error:
        known = list(inspect.signature(GENERATORS[name]).parameters)[1:]
        raise DataError(
            f"The generator {name} cannot use these options ({error}). It takes: {', '.join(known)}."
        ) from None
    return ((row, f"{name} row {number}") for number, row in enumerate(rows, 1))


def _in_directory(path: Path, split: str) -> Path:
    names = _SPLITS.get(split, (split,))
    for name in names:
        found = sorted(file for file in path.glob(f"{name}.*") if file.is_file())
        if len(found) > 1:
            raise DataError(
                f"{path} has several files for the split {name}: {', '.join(f.name for f in found)}. Name "
                "one of them."
            )
        if found:
            return found[0]
    inside = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    raise DataError(
        f"{path} has no file named {' or '.join(names)} with a suffix such as .jsonl; it holds {inside}."
    )


def _hub(name: str, split: str, options: dict[str, Any]) -> Iterable[Located]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UnavailableError(
            f"There is no file {name}, and reading it from the Hugging Face hub needs the package datasets. "
            "`pip install datasets`, or download the data and name the file."
        ) from None
    try:
        available = datasets.get_dataset_split_names(name, options.get("name"))
        chosen = next((known for known in _SPLITS.get(split, (split,)) if known in available), split)
        data = datasets.load_dataset(name, split=chosen, **options)
    except Exception as error:
        raise UnavailableError(
            f"The data set {name} could not be had from the Hugging Face hub: {error}"
        ) from error
    return ((row, f"{name}[{chosen}] row {number}") for number, row in enumerate(data, 1))


def _digest(row: Row, seed: int) -> int:
    text = json.dumps(row, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest(), "big")
