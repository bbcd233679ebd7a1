"""The commands, their arguments and their help; each one's work is in the module of its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hetero import __version__
from hetero.cli.bench_app import bench
from hetero.cli.commands import command
from hetero.cli.recipes_app import recipes
from hetero.cli.sandbox_app import sandbox
from hetero.errors import HeteroError
from hetero.formats import AUTO, LOADABLE

app = typer.Typer(
    name="hetero",
    help="Post-train Mixture-of-Experts language models on one box.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipes, name="recipes")
app.add_typer(sandbox, name="sandbox")
app.add_typer(bench, name="bench")


def _weight_format(name: str) -> str:
    if name not in (AUTO, *LOADABLE):
        raise typer.BadParameter(f"{name!r} is none of {', '.join((AUTO, *LOADABLE))}.")
    return name


RecipeArg = Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with hetero.")]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Overrides of recipe keys.")
]
ModelArg = Annotated[str, typer.Argument(help="A checkpoint directory, a Hub id, or 'quickstart'.")]
AdapterOption = Annotated[
    Path | None, typer.Option(help="A PEFT adapter directory, such as DIR/adapter of a run.")
]
ExpertsOption = Annotated[
    str,
    typer.Option(callback=_weight_format, help="Weight format of the experts: model.experts of a recipe."),
]
SystemOption = Annotated[str | None, typer.Option(help="A system message.")]
TokensOption = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
TemperatureOption = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 = greedy.")]
TopPOption = Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling; 1 = off.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Sample among the k likeliest tokens; 0 = off.")]
MinPOption = Annotated[
    float, typer.Option(min=0, max=1, help="Drop tokens less likely than this share of the likeliest.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed: the same seed gives the same answer.")]


@app.command()
def rl(
    recipe: RecipeArg,
    overrides: OverridesArg = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default a new one under runs/.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and a memory plan; load nothing.")
    ] = False,
) -> None:
    """Train a model by reinforcement learning, as a recipe says."""
    command("rl", recipe=recipe, overrides=overrides or [], out=out, resume=resume, dry_run=dry_run)


@app.command()
def generate(
    model: ModelArg,
    prompt: Annotated[str, typer.Option(help="The user's message; '-' reads it from standard input.")],
    adapter: AdapterOption = None,
    experts: ExpertsOption = AUTO,
    system: SystemOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")
    ] = False,
    max_tokens: TokensOption = 256,
    temperature: TemperatureOption = 1.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
) -> None:
    """Answer one prompt, token by token."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    command(
        "generate",
        model=model,
        prompt=prompt,
        adapter=adapter,
        experts=experts,
        system=system,
        raw=raw,
        max_tokens=max_tokens,
        sampling=sampling,
    )


@app.command()
def chat(
    model: ModelArg,
    adapter: AdapterOption = None,
    experts: ExpertsOption = AUTO,
    system: SystemOption = None,
    max_tokens: TokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
) -> None:
    """Talk to a model in the terminal."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    command(
        "chat",
        model=model,
        adapter=adapter,
        experts=experts,
        system=system,
        max_tokens=max_tokens,
        sampling=sampling,
    )


@app.command("eval")
def evaluate(
    recipe: RecipeArg,
    overrides: OverridesArg = None,
    adapter: AdapterOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")
    ] = False,
) -> None:
    """Measure a model, with or without an adapter, on a recipe's held-out tasks."""
    command("evaluate", recipe=recipe, overrides=overrides or [], adapter=adapter, as_json=json)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write RUN/report.html: curves and completions on one self-contained page."""
    command("report", directory=run)


@app.command()
def upcycle(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A dense checkpoint directory or .gguf file.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory for the Mixture-of-Experts checkpoint.")
    ],
    experts: Annotated[int, typer.Option(min=1, help="Experts per layer.")] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 2,
    architecture: Annotated[str, typer.Option(help="mixtral or qwen2_moe.")] = "mixtral",
    router_std: Annotated[float, typer.Option(min=0, help="Standard deviation of the random router.")] = 0.02,
    expert_noise: Annotated[
        float,
        typer.Option(min=0, help="Noise that tells experts apart, relative to their weights; 0 = none."),
    ] = 0.0,
    seed: SeedOption = 0,
) -> None:
    """Turn a dense model into a Mixture of Experts that computes the same function."""
    command(
        "upcycle",
        source=source,
        out=out,
        options={
            "experts": experts,
            "top_k": top_k,
            "architecture": architecture,
            "router_std": router_std,
            "expert_noise": expert_noise,
            "seed": seed,
        },
    )


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A checkpoint directory, a Hub id, or 'quickstart'; by default a tiny random model."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="As model.device of a recipe: auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the kernels; default: one per core.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")] = False,
) -> None:
    """Check this machine and a model: exactness, adapter, cache, memory. Exit status 1 when one is red."""
    command("doctor", model=model, device=device, threads=threads, as_json=json)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hetero {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train Mixture-of-Experts language models on one box."""


def main() -> None:
    """Run the command line. Errors of ours and of the file system are one paragraph and exit status 1
    (usage: 2); HETERO_DEBUG=1 shows the traceback."""
    try:
        app()
    except (HeteroError, OSError) as error:
        if os.environ.get("HETERO_DEBUG") == "1":
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
