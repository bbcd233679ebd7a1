"""`hetero sandbox run | shell | ls | gc | bench | doctor | audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.commands import command

sandbox = typer.Typer(
    help="Isolated environments: run commands in them, look after them, measure them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
audit = typer.Typer(help="The journals of what sandboxes did.", no_args_is_help=True, rich_markup_mode=None)
sandbox.add_typer(audit, name="audit")

ImageOption = Annotated[
    Path | None,
    typer.Option(
        help="An OCI layout or archive, a `docker save` file, a root file system, or a directory that "
        "becomes /workspace; default: the host's programs."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
IsolationOption = Annotated[str, typer.Option(help="Refuse to run with less than this tier.")]
TierOption = Annotated[
    str, typer.Option(help="What holds the sandbox in: ns, landlock, bwrap, gvisor, microvm.")
]
JournalArg = Annotated[Path, typer.Argument(help="A journal file.")]


@sandbox.command("run", context_settings={"ignore_unknown_options": True})
def run_command(
    argv: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command, after `--`.")],
    image: ImageOption = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds until it is killed; default: no deadline.")
    ] = None,
    memory: Annotated[int, typer.Option(min=1, help="Megabytes of memory.")] = 2048,
    stdin: Annotated[bool, typer.Option("--stdin", help="Pass standard input on.")] = False,
    tier: TierOption = "ns",
    min_isolation: IsolationOption = "ns",
) -> None:
    """Run one command in a new sandbox; exits with its status (124 after the deadline, 128 + signal)."""
    raise typer.Exit(
        command(
            "sandbox_run",
            argv=argv,
            image=image,
            timeout=timeout,
            memory_mb=memory,
            stdin=stdin,
            tier=tier,
            min_isolation=min_isolation,
        )
    )


@sandbox.command()
def shell(image: ImageOption = None, tier: TierOption = "ns", min_isolation: IsolationOption = "ns") -> None:
    """An interactive bash in a new sandbox."""
    raise typer.Exit(command("sandbox_shell", image=image, tier=tier, min_isolation=min_isolation))


@sandbox.command("ls")
def list_boxes(json: JsonOption = False) -> None:
    """The sandboxes and layers in the store, and whose they are."""
    command("sandbox_store", as_json=json)


@sandbox.command()
def gc(
    image_days: Annotated[
        float, typer.Option(min=0, help="Keep unpacked images that were used in so many days.")
    ] = 30,
    json: JsonOption = False,
) -> None:
    """Remove what owners that are gone have left behind, and unpacked images that nobody uses any more."""
    command("sandbox_gc", image_days=image_days, as_json=json)


@sandbox.command()
def bench(
    json: JsonOption = False,
    n: Annotated[int, typer.Option(min=1, help="Repetitions of each operation.")] = 200,
    crowd: Annotated[
        int, typer.Option(min=0, help="Also let so many sandboxes run tests at once; 0: none.")
    ] = 0,
) -> None:
    """Measure create, exec, snapshot, fork and close, and the memory of an idle sandbox."""
    command("sandbox_bench", as_json=json, n=n, crowd=crowd)


@sandbox.command()
def doctor(json: JsonOption = False) -> None:
    """Try what sandboxes need, and say how to fix what fails."""
    raise typer.Exit(command("sandbox_doctor", as_json=json))


@audit.command()
def verify(journal: JournalArg) -> None:
    """Check that no line of a journal was changed, removed or put in."""
    command("sandbox_audit", journal=journal)


@audit.command()
def show(journal: JournalArg, json: JsonOption = False) -> None:
    """Print the events of a journal."""
    command("sandbox_audit", journal=journal, show=True, as_json=json)
