"""Sections `model`, `lora` and `engine`: what is loaded, what is trained, how it generates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from hetero.formats import AUTO, LOADABLE
from hetero.recipe.sections.base import Section, one_of

SIZE = r"^\d+(\.\d+)?\s*([KMGT]i?B|B)$"
"""Bytes, such as 512MiB."""


class ModelSection(Section):
    """The model: one copy of its base weights serves rollouts, training and reference."""

    path: str = Field(min_length=1)
    """A checkpoint directory, a GGUF file, a Hub id, or `quickstart` (built once from a small package)."""
    experts: str = AUTO
    """Weight format of the routed experts in RAM; `auto` keeps the codes of a checkpoint in fp8, mxfp4 or
    GGUF as they are, and bf16 for plain weights."""
    dense: str = "bf16"
    """Weight format of all other linear layers; `torch` leaves them, and attention, to PyTorch."""
    group_size: Literal[32, 64, 128] | None = None
    """Weights of an expert that share a scale; the default is the format's own. Fewer: smaller error, more
    memory."""
    symmetric: bool | None = None
    """Whether the experts' codes lie around zero; `false` takes the format with a minimum per group, such as
    int4_asym for int4."""
    scale_search: Literal["max", "mse"] = "max"
    """How scales are chosen, of experts and dense layers: `max` lets them just hold the largest weight of a
    group, `mse` takes those of the least squared error (slower loading)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where attention, norms, router and head live; the experts always stay in RAM. `auto` takes a GPU if
    there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the kernels; by default one per physical core. Does not change results."""

    @field_validator("experts", "dense")
    @classmethod
    def _known_format(cls, value: str, info: ValidationInfo) -> str:
        known = [*LOADABLE, "torch"] if info.field_name == "dense" else [AUTO, *LOADABLE]
        return one_of(value, known, "a weight format")


class LoraSection(Section):
    """The adapter, the only weights that change."""

    rank: int = Field(default=16, ge=1)
    """Rank of every pair of factors."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: list[str] = Field(default=["attention", "mlp", "experts"], min_length=1)
    """Which layers get factors: attention, mlp, experts, or regular expressions that match whole module
    names."""
    expert_layout: Literal["shared_outer", "per_expert"] = "shared_outer"
    """`shared_outer`: experts of a layer share the factor on the hidden side (3.6 times fewer parameters);
    `per_expert`: none shared."""
    expert_rank: int | None = Field(default=None, ge=1)
    """Rank on the experts, if it shall differ from `rank`."""
    start_from: str | None = None
    """A PEFT adapter directory to continue from; the default is a fresh adapter, which changes nothing at
    first."""

    @field_validator("targets")
    @classmethod
    def _group_or_expression(cls, value: list[str]) -> list[str]:
        for target in value:
            if not set(target) & set("\\.*+?[](){}|^$"):
                one_of(target, ("attention", "mlp", "experts"), "a group of layers or a regular expression")
        return value


class EngineSection(Section):
    """Generation. None of these keys changes what is sampled, only speed and memory."""

    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that decode together."""
    kv_memory: str = Field(default="1GiB", pattern=SIZE)
    """Memory of the KV cache, such as 512MiB or 8GiB."""
    kv_ram: str | None = Field(default=None, pattern=SIZE)
    """RAM for blocks that fell out of `kv_memory`; by default none."""
    kv_disk: str | None = Field(default=None, min_length=1)
    """Directory of files for blocks of the KV cache, kept between runs and shared by processes; by default
    none."""
    kv_disk_size: str | None = Field(default=None, pattern=SIZE)
    """Most bytes in `kv_disk`; the blocks used longest ago go first. By default 16GiB."""
    prefill_chunk: int = Field(default=512, ge=1)
    """Prompt tokens per forward; long prompts are cut into chunks of this size."""
