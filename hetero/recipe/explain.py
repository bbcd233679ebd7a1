"""Turns what pydantic found into one paragraph: where, which key, what was got, what to write instead."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hetero.errors import RecipeError
from hetero.recipe.source import Key, Source
from hetero.recipe.suggest import known_keys, nearest, nearest_key

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "text of at least {min_length} character(s)",
    "string_pattern_mismatch": "a size with a unit, such as 512MiB or 8GiB",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def recipe_error(error: ValidationError, source: Source, recipe: type[BaseModel]) -> RecipeError:
    """One RecipeError for everything that is wrong with `source`."""
    problems = [_problem(item, source, recipe) for item in error.errors()]
    if len(problems) == 1:
        return RecipeError(problems[0])
    listed = " ".join(f"({i}) {text}" for i, text in enumerate(problems, 1))
    return RecipeError(f"{source.name} has {len(problems)} problems: {listed}")


def _problem(item: ErrorDetails, source: Source, recipe: type[BaseModel]) -> str:
    key: Key = tuple(part for part in item["loc"] if part != "[key]")
    path = ".".join(map(str, key))
    place = source.place(key)
    if item["type"] == "extra_forbidden":
        return f"{place}: there is no key {path}. {nearest_key(recipe, key)}"
    if item["type"] == "missing":
        write = f"Write {key[-1]}: under {_parent(key)}.{_meaning(recipe, key)}"
        return f"{place}: the key {path} is missing. {write}"
    if item["type"] == "value_error":
        said = str(item["ctx"]["error"])
        lead = f"{path} " if path else ""
        return f"{place}: {lead}{said}{_meaning(recipe, key)}"
    expected = _expected(item)
    near = nearest(str(item["input"]), _choices(recipe, key)) if item["type"] == "literal_error" else None
    hint = f" Did you mean {near}?" if near else ""
    return f"{place}: {path} is {shown(item['input'])}, but must be {expected}.{hint}{_meaning(recipe, key)}"


def shown(value: Any) -> str:
    """A value as one writes it in YAML."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _expected(item: ErrorDetails) -> str:
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"])
    known = _EXPECTED.get(item["type"])
    return known.format(**item.get("ctx", {})) if known else item["msg"][0].lower() + item["msg"][1:]


def _parent(key: Key) -> str:
    return ".".join(map(str, key[:-1])) if len(key) > 1 else "the top level"


def _meaning(recipe: type[BaseModel], key: Key) -> str:
    field = _field(recipe, key)
    if field is None or not field.description:
        return ""
    return f" ({'.'.join(map(str, key))}: {' '.join(field.description.split())})"


def _field(recipe: type[BaseModel], key: Key) -> FieldInfo | None:
    fields = known_keys(recipe, key[:-1])
    return fields.get(str(key[-1])) if key and fields else None


def _choices(recipe: type[BaseModel], key: Key) -> list[str]:
    while key and isinstance(key[-1], int):
        key = key[:-1]
    field = _field(recipe, key)
    return _literals(field.annotation) if field is not None else []


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(arg) for arg in get_args(annotation)]
    return [name for arg in get_args(annotation) for name in _literals(arg)]
