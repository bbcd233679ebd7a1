"""`hetero eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from hetero.cli.quiet import quiet_libraries
from hetero.errors import DataError
from hetero.recipe.recipe import Recipe
from hetero.rl.environment import SingleTurn
from hetero.run.evaluation import evaluate
from hetero.run.making import eval_sampling, make_engine, make_pool
from hetero.run.opening import opened
from hetero.run.tasks import load_tasks


def run(recipe: str, overrides: Sequence[str], adapter: Path | None, as_json: bool) -> None:
    """Sample answers to the held-out tasks of a recipe and print how many are right."""
    quiet_libraries()
    resolved = Recipe.load(recipe, overrides)
    section, rl = resolved.eval, resolved.rl
    tasks = load_tasks(resolved.data, section.prompts)
    if not tasks.held_out:
        raise DataError(
            f"{recipe} has no held-out tasks: set data.eval, or data.held_out to split some off the "
            "training data."
        )
    with (
        make_pool(resolved) as pool,
        opened(
            resolved.model, adapter=adapter, chat=resolved.data.chat, template=resolved.data.template
        ) as loaded,
        make_engine(resolved, loaded) as engine,
    ):
        pool.check_columns(tasks.columns)
        context = loaded.model.config.get_text_config().max_position_embeddings
        max_tokens = section.max_tokens or rl.max_tokens
        held_out = tasks.fit(loaded.renderer, context, rl.max_tokens, max_tokens).held_out
        record = evaluate(
            engine.generate,
            held_out,
            partial(SingleTurn, loaded.renderer, pool),
            pool,
            samples=section.samples,
            sampling=eval_sampling(resolved, loaded),
            correct_from=section.correct_from,
            step=0,
        )
    if as_json:
        typer.echo(json.dumps({**record, "adapter": str(adapter) if adapter else None}))
        return
    who = f"{resolved.model.path} with {adapter}" if adapter else resolved.model.path
    if not record["samples"]:
        typer.echo(f"{who}: none of {record['masked']} completions could be scored.")
        return
    typer.echo(
        f"{who}: {record['accuracy']:.3f} of {record['samples']} answers to {len(held_out)} held-out tasks "
        f"are right; mean reward {record['reward']:.3f}."
    )
