"""Reads YAML and remembers on which line every key stands.

YAML 1.2's core types are used, not PyYAML's 1.1 ones: `2e-4` is a number, `on` and `no` are text, `010` is
ten and `1:30` is not ninety.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hetero.errors import RecipeError

Key = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
_Loader.yaml_implicit_resolvers[""] = _Loader.yaml_implicit_resolvers.pop("\0")


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    digits = text.lstrip("+-")
    base = {"0x": 16, "0o": 8}.get(digits[:2], 10)
    return int(text, base)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


@dataclass
class Source:
    """A recipe's plain data and where each part of it was written.

    Attributes:
        name: what to call the whole in messages: the file's path.
        data: nested mappings, lists and scalars.
        where: (section, key, ...) -> "file:line" or "override key=value".
    """

    name: str
    data: dict[str, Any]
    where: dict[Key, str] = field(default_factory=dict)

    def place(self, key: Key) -> str:
        """Where `key`, or else the nearest thing around it, was written."""
        while key and key not in self.where:
            key = key[:-1]
        return self.where.get(key, self.name)


def read(path: Path) -> Source:
    """Read a recipe file. RecipeError: no such file, no YAML, no mapping, a key given twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"There is no recipe file {path} (looked in {Path.cwd()}). `hetero recipes list` names those "
            "that come with hetero."
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8. Convert the file, such as "
            "with `iconv -f latin1 -t utf-8`."
        ) from None
    except OSError as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error}.") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Source:
    """Parse a recipe's text; `name` stands for the file in messages."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        source = Source(name, {}, {})
        if root is not None:
            _note(root, (), source)
            source.data = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise RecipeError(_syntax(error, name)) from None
    finally:
        loader.dispose()
    if not isinstance(source.data, dict):
        raise RecipeError(
            f"{name}:1: a recipe is a mapping of sections (model, rl, train, ...), but this is "
            f"{source.data!r}."
        )
    return source


def scalar(text: str) -> Any:
    """The typed value of an override's right-hand side; YAMLError if it is no YAML."""
    return yaml.load(text, _Loader)


def _note(node: yaml.Node, key: Key, source: Source) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            child = (*key, str(key_node.value))
            place = f"{source.name}:{key_node.start_mark.line + 1}"
            if child in source.where:
                first = source.where[child].rsplit(":", 1)[-1]
                raise RecipeError(
                    f"{place}: the key {'.'.join(map(str, child))} was already given in line {first}. "
                    "Remove one."
                )
            source.where[child] = place
            _note(value, child, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            item = (*key, index)
            source.where[item] = f"{source.name}:{value.start_mark.line + 1}"
            _note(value, item, source)


def _syntax(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{name}:{mark.line + 1}" if mark is not None else name
    problem = getattr(error, "problem", None) or str(error)
    return (
        f"{place}: this is not valid YAML: {problem}. Check the indentation (spaces, no tabs) and the colons "
        "around here."
    )
