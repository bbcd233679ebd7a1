"""Checks between keys: what each value allows alone and the whole forbids. All before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from hetero.errors import ArgumentError, RecipeError, RewardError, ShapeError
from hetero.formats import FORMATS, chosen_packing
from hetero.recipe.sections.whole import Sections
from hetero.recipe.source import Key, Source
from hetero.recipe.suggest import nearest
from hetero.rl.algorithms import ALGORITHMS
from hetero.rl.rewards.spec import RewardSpec, target
from hetero.train.correction import Correction

_NO_GROUP = ("batch_norm",)
"""Advantages whose baseline is the whole batch, so that groups may be of one."""


def check(recipe: Sections, source: Source) -> None:
    """Raise one RecipeError for everything in `recipe` that cannot work together."""
    found = [
        *_sizes(recipe),
        *_formats(recipe),
        *_evaluation(recipe),
        *_correction(recipe),
        *_names(recipe),
    ]
    problems = [f"{source.place(_key(name))}: {name} {text}" for name, text in found]
    if len(problems) == 1:
        raise RecipeError(problems[0])
    if problems:
        listed = " ".join(f"({i}) {text}" for i, text in enumerate(problems, 1))
        raise RecipeError(f"{source.name} has {len(problems)} problems: {listed}")


def _key(name: str) -> Key:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def _sizes(recipe: Sections) -> Iterator[tuple[str, str]]:
    train, lora, engine = recipe.train, recipe.lora, recipe.engine
    if engine.kv_disk_size is not None and engine.kv_disk is None:
        yield "engine.kv_disk_size", f"is {engine.kv_disk_size}, but there is no engine.kv_disk to limit."
    if train.warmup_steps > train.steps:
        yield "train.warmup_steps", f"is {train.warmup_steps}, more than the {train.steps} of train.steps."
    if lora.expert_rank is not None and "experts" not in lora.targets:
        yield "lora.expert_rank", f"is {lora.expert_rank}, but lora.targets has no experts."


def _formats(recipe: Sections) -> Iterator[tuple[str, str]]:
    model = recipe.model
    for key in ("group_size", "symmetric"):
        try:
            chosen_packing(model.experts, **{key: getattr(model, key)})
        except ShapeError as error:
            yield f"model.{key}", f"cannot be used. {error}"
    scaled = [name for name in (model.experts, model.dense) if name in FORMATS and FORMATS[name].group_size]
    if model.scale_search != "max" and not scaled:
        yield (
            "model.scale_search",
            f"is {model.scale_search}, but neither model.experts nor model.dense names a format with scales, "
            "such as int4.",
        )


def _evaluation(recipe: Sections) -> Iterator[tuple[str, str]]:
    evaluation, data = recipe.eval, recipe.data
    if evaluation.every and data.eval is None and data.held_out is None:
        yield (
            "eval.every",
            f"is {evaluation.every}, but there are no held-out tasks: set data.eval, or data.held_out to "
            "split some off.",
        )
    if data.eval is not None and data.held_out is not None:
        yield (
            "data.held_out",
            f"is {data.held_out}, but data.eval already names held-out tasks: remove one of them.",
        )
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield "eval.samples", f"is {evaluation.samples}, but at temperature 0 all of them are equal: take 1."


def _correction(recipe: Sections) -> Iterator[tuple[str, str]]:
    rl = recipe.rl
    try:
        Correction(rl.correction, rl.correction_low, rl.correction_high)
    except ArgumentError as error:
        yield "rl.correction", f"cannot be used. {error}."


def _names(recipe: Sections) -> Iterator[tuple[str, str]]:
    rl = recipe.rl
    if rl.algorithm not in ALGORITHMS:
        near = nearest(rl.algorithm, ALGORITHMS)
        hint = f" Did you mean {near}?" if near else ""
        yield "rl.algorithm", f"is {rl.algorithm!r}, but must be one of {', '.join(ALGORITHMS)}.{hint}"
    elif rl.group_size < 2 and ALGORITHMS[rl.algorithm].advantage not in _NO_GROUP:
        yield (
            "rl.group_size",
            f"is {rl.group_size}, but {rl.algorithm} compares the completions of a group with each other: "
            "take at "
            "least 2.",
        )
    specs = [RewardSpec(**spec.model_dump()) for spec in rl.rewards]
    for index, spec in enumerate(specs):
        try:
            target(spec)
        except RewardError as error:
            yield f"rl.rewards.{index}", f"cannot be used. {error}"
