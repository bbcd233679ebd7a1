"""The recipes that come with hetero."""

from __future__ import annotations

from pathlib import Path

from hetero.errors import RecipeError
from hetero.recipe.suggest import nearest

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "_recipes", _PACKAGE.parent / "recipes")
"""In an installed wheel, in a checkout."""


def shipped() -> dict[str, Path]:
    """Name -> file of every recipe that comes with hetero."""
    for place in _PLACES:
        files = sorted(place.glob("*.yaml"))
        if files:
            return {file.stem: file for file in files}
    return {}


def locate(recipe: str | Path) -> Path:
    """The file of `recipe`: a path as it stands, or else the name of a shipped recipe."""
    path = Path(recipe)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return path
    known = shipped()
    name = str(recipe)
    if name in known:
        return known[name]
    near = nearest(name, known)
    hint = f" Did you mean {near}?" if near else ""
    raise RecipeError(
        f"There is no recipe {name!r}, neither a .yaml file nor one of: {', '.join(known)}.{hint}"
    )


def summary(path: Path) -> str:
    """The first comment line of a recipe file: what it does, in one line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# yaml-language-server"):
            return line[2:].strip()
    return ""
