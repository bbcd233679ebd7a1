"""`--dry-run`: the resolved recipe, the memory it will take, the tokens of a step."""

from __future__ import annotations

import typer

from hetero.errors import ModelError
from hetero.recipe.recipe import Recipe
from hetero.run.plan import memory_plan, readable


def print_plan(recipe: Recipe) -> None:
    """Print everything that is known before anything is loaded; YAML, with the plan as comments."""
    typer.echo(recipe.to_yaml())
    rl = recipe.rl
    samples = rl.prompts_per_step * rl.group_size
    typer.echo(
        f"# a step: {rl.prompts_per_step} prompts x {rl.group_size} completions of at most {rl.max_tokens} "
        f"tokens, {samples * rl.max_tokens:,} sampled tokens at most; {recipe.train.steps} steps"
    )
    try:
        plan = memory_plan(recipe)
    except ModelError as error:
        typer.echo(f"# memory: not known. {error}")
        return
    typer.echo(
        f"# model: {plan.num_weights / 1e6:,.1f} M weights, {plan.num_expert_weights / 1e6:,.1f} M of them "
        f"in routed experts; adapter: {plan.num_adapter / 1e6:,.2f} M"
    )
    typer.echo(f"# KV cache: {plan.kv_tokens:,} tokens")
    width = max(map(len, plan.parts))
    for name, size in plan.parts.items():
        typer.echo(f"# {name:<{width}}  {readable(size):>10}")
    typer.echo(f"# {'together':<{width}}  {readable(plan.total):>10}")
