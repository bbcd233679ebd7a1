"""The Recipe: a whole run in one value, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from hetero.recipe.catalog import locate
from hetero.recipe.checks import check
from hetero.recipe.explain import recipe_error
from hetero.recipe.overrides import apply
from hetero.recipe.sections.whole import Sections
from hetero.recipe.source import Source, parse, read

R = TypeVar("R", bound="Recipe")


class Recipe(Sections):
    """A hetero recipe: which model, which data, which reward, how long."""

    @classmethod
    def load(cls: type[R], recipe: str | Path, overrides: Iterable[str] = ()) -> R:
        """Read a YAML file (or the name of a recipe that comes with hetero), apply overrides, check.

        Raises RecipeError, one paragraph with file and line, for anything that is wrong with it.
        """
        return cls.build(apply(read(locate(recipe)), overrides))

    @classmethod
    def from_yaml(cls: type[R], text: str, name: str = "recipe") -> R:
        """Check a recipe given as YAML text."""
        return cls.build(parse(text, name))

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any], name: str = "recipe") -> R:
        """Check a recipe given as nested mappings."""
        return cls.build(Source(name, dict(data)))

    @classmethod
    def build(cls: type[R], source: Source) -> R:
        """Check a source that was read, with its places in the messages."""
        try:
            recipe = cls.model_validate(source.data)
        except ValidationError as error:
            raise recipe_error(error, source, cls) from None
        check(recipe, source)
        return recipe

    def to_yaml(self) -> str:
        """The resolved recipe, every key spelt out. `Recipe.from_yaml` gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def json_schema(cls) -> str:
        """JSON schema for editors: completion, descriptions and errors while typing."""
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}
        return json.dumps(schema, indent=2)
