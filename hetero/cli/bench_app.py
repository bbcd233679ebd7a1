"""`hetero bench machine | moe | linear | attention | rows | exactness | decode | prefill | step`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.commands import command

bench = typer.Typer(
    help="Measure this machine, then kernels and whole models on it; results are checked before timing.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Threads of the kernels; default: all physical cores.")
]
FormatOption = Annotated[str, typer.Option(help="Weight format, such as bf16.")]
GroupOption = Annotated[
    int | None,
    typer.Option(help="Values that share a scale: 32, 64 or 128; default: the format's own."),
]
TokensOption = Annotated[str, typer.Option(help="Rows of every case, with commas between.")]
IsaOption = Annotated[
    str | None, typer.Option(help="Instruction sets, with commas between; default: the best here.")
]
BackwardOption = Annotated[bool, typer.Option("--backward", help="Time forward and backward.")]
RankOption = Annotated[int, typer.Option(min=0, help="Rank of LoRA factors; 0 = none.")]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        help="A peer to time in turn with us: torch (bf16), torch-fp32; of moe also kt-kernel, llama.cpp (in "
        "our format), kt-kernel-bf16."
    ),
]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed calls at least, and pairs with a peer.")]
SecondsOption = Annotated[float, typer.Option(min=0, help="Seconds that each case is timed at least.")]
RotateOption = Annotated[
    float, typer.Option(min=0, help="GB of weights that calls go through before the first come again.")
]
SvgOption = Annotated[Path | None, typer.Option(help="Write a roofline plot to this file.")]
MODEL_SHAPES = "A model (qwen3-30b-a3b, gpt-oss-20b, deepseek-v3, glm-4.5-air, ...) or numbers"


@bench.command()
def machine(threads: ThreadsOption = None, json: JsonOption = False) -> None:
    """Measure read bandwidth and the peak of every instruction set that runs here."""
    command("bench", threads=threads, as_json=json)


@bench.command()
def moe(
    shape: Annotated[
        str, typer.Option(help=f"{MODEL_SHAPES}: E=128,top_k=8,hidden=2048,intermediate=768.")
    ] = "qwen3-30b-a3b",
    format: FormatOption = "bf16",
    group_size: GroupOption = None,
    tokens: TokensOption = "1,8,32,2048",
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    backward: BackwardOption = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Keep only the inputs for backward.")
    ] = False,
    lora_rank: RankOption = 0,
    against: AgainstOption = None,
    rivals: Annotated[
        int, typer.Option(min=0, help="Time it once more beside this many busy processes.")
    ] = 0,
    repeats: RepeatsOption = 5,
    seconds: SecondsOption = 1.0,
    rotate_gb: RotateOption = 2.0,
    svg: SvgOption = None,
    json: JsonOption = False,
) -> None:
    """Measure one layer of routed experts."""
    wanted: dict[str, object] = {"shape": shape, "format": format, "group_size": group_size}
    wanted |= {"backward": backward, "lora_rank": lora_rank, "against": against, "recompute": recompute}
    wanted |= {"rivals": rivals, "rotate": int(rotate_gb * 1e9)}
    _kernels("moe", wanted, tokens, threads, isa, repeats, seconds, svg, json)


@bench.command()
def linear(
    shape: Annotated[
        str, typer.Option(help=f"{MODEL_SHAPES}: N=4096,K=2048. MODEL/o_proj is one linear of it.")
    ] = "qwen3-30b-a3b",
    format: FormatOption = "bf16",
    group_size: GroupOption = None,
    tokens: TokensOption = "1,8,32,2048",
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    backward: BackwardOption = False,
    lora_rank: RankOption = 0,
    against: AgainstOption = None,
    repeats: RepeatsOption = 5,
    seconds: SecondsOption = 1.0,
    rotate_gb: RotateOption = 2.0,
    svg: SvgOption = None,
    json: JsonOption = False,
) -> None:
    """Measure the dense linears of a model."""
    wanted: dict[str, object] = {"shape": shape, "format": format, "group_size": group_size}
    wanted |= {"backward": backward, "lora_rank": lora_rank, "against": against}
    wanted |= {"rotate": int(rotate_gb * 1e9)}
    _kernels("linear", wanted, tokens, threads, isa, repeats, seconds, svg, json)


@bench.command()
def attention(
    shape: Annotated[
        str, typer.Option(help=f"{MODEL_SHAPES}: heads=32,kv_heads=4,dim=128[,v_dim=..][,window=..].")
    ] = "qwen3-30b-a3b",
    tokens: TokensOption = "1,8,32,2048",
    context: Annotated[
        int,
        typer.Option(
            min=0,
            help="Positions in the cache of each of TOKENS sequences that decode; "
            "0 = TOKENS new tokens of one sequence.",
        ),
    ] = 0,
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    backward: BackwardOption = False,
    against: AgainstOption = None,
    repeats: RepeatsOption = 5,
    seconds: SecondsOption = 1.0,
    rotate_gb: RotateOption = 2.0,
    svg: SvgOption = None,
    json: JsonOption = False,
) -> None:
    """Measure attention: prefill and training, or decoding from the paged cache."""
    wanted = {"shape": shape, "backward": backward, "context": context, "against": against}
    wanted |= {"rotate": int(rotate_gb * 1e9)}
    _kernels("attention", wanted, tokens, threads, isa, repeats, seconds, svg, json)


@bench.command()
def rows(
    shape: Annotated[
        str, typer.Option(help=f"{MODEL_SHAPES}: E=128,top_k=8,hidden=2048,vocab=151936.")
    ] = "qwen3-30b-a3b",
    tokens: TokensOption = "1,8,32,2048",
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    backward: BackwardOption = False,
    against: AgainstOption = None,
    repeats: RepeatsOption = 5,
    seconds: SecondsOption = 1.0,
    svg: SvgOption = None,
    json: JsonOption = False,
) -> None:
    """Measure what works on one row at a time: norms, routers, sampling."""
    wanted: dict[str, object] = {"shape": shape, "backward": backward, "against": against}
    _kernels("rows", wanted, tokens, threads, isa, repeats, seconds, svg, json)


@bench.command()
def exactness(
    shape: Annotated[str, typer.Option(help="A model: quickstart, qwen3-30b-a3b, ...")] = "quickstart",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that decode one token each.")] = 64,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one training step.")] = 1024,
    threads: ThreadsOption = None,
    repeats: RepeatsOption = 3,
    seconds: SecondsOption = 0.3,
    rotate_gb: RotateOption = 0.5,
    json: JsonOption = False,
) -> None:
    """Measure what bit-equal rollouts and training cost against the fastest PyTorch operations."""
    wanted: dict[str, object] = {"shape": shape, "rotate": int(rotate_gb * 1e9)}
    _kernels("exactness", wanted, f"{sequences},{step_tokens}", threads, None, repeats, seconds, None, json)


def _kernels(
    op: str,
    wanted: dict[str, object],
    tokens: str,
    threads: int | None,
    isa: str | None,
    repeats: int,
    seconds: float,
    svg: Path | None,
    as_json: bool,
) -> None:
    command(
        "bench",
        op=op,
        wanted=wanted,
        tokens=tokens,
        isas=isa,
        threads=threads,
        repeats=repeats,
        seconds=seconds,
        svg=svg,
        as_json=as_json,
    )


ModelArg = Annotated[str, typer.Argument(help="A checkpoint directory, a Hub id, or 'quickstart'.")]
ModelPeerOption = Annotated[str | None, typer.Option(help="A peer to run in turn with us: transformers.")]
PeerDtypeOption = Annotated[str, typer.Option(help="The peer's dtype: bfloat16 or float32.")]
PeerExpertsOption = Annotated[str, typer.Option(help="The peer's experts: grouped_mm or eager.")]
SequencesOption = Annotated[int, typer.Option(min=1, help="Sequences that run at once.")]
PromptOption = Annotated[int, typer.Option(min=1, help="Tokens of every prompt.")]
NewOption = Annotated[int, typer.Option(min=1, help="Tokens after every prompt.")]
PairsOption = Annotated[int, typer.Option(min=1, help="Pairs of runs; the median ratio is reported.")]
BestOfOption = Annotated[int, typer.Option(min=1, help="Repeats within a run; the best counts.")]


def _model_command(case: str, help: str) -> None:
    @bench.command(case, help=help)
    def run(
        model: ModelArg = "quickstart",
        format: FormatOption = "bf16",
        against: ModelPeerOption = None,
        peer_dtype: PeerDtypeOption = "bfloat16",
        peer_experts: PeerExpertsOption = "grouped_mm",
        sequences: SequencesOption = 64,
        prompt_tokens: PromptOption = 64,
        new_tokens: NewOption = 32,
        pairs: PairsOption = 3,
        repeats: BestOfOption = 2,
        threads: ThreadsOption = None,
        svg: SvgOption = None,
        json: JsonOption = False,
    ) -> None:
        command(
            "bench_model",
            case=case,
            model=model,
            format=format,
            against=against,
            peer={"dtype": peer_dtype, "experts": peer_experts},
            num_pairs=pairs,
            repeats=repeats,
            threads=threads,
            as_json=json,
            svg=svg,
            sizes={"num_sequences": sequences, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
        )


_model_command("decode", "Measure generation with a whole model, alone or in turn with a peer.")
_model_command("prefill", "Measure reading prompts with a whole model, alone or in turn with a peer.")
_model_command("step", "Measure forward and backward of a LoRA training step, alone or in turn with a peer.")
