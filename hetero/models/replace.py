"""After loading: puts exact modules in the place of everything on the CPU whose bits would depend on the
batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from hetero.models.activation import HeteroActivation, activation_kind
from hetero.models.audit import callers, inexact
from hetero.models.exact import run_exactly
from hetero.models.experts import replace_module
from hetero.models.linear import HeteroLinear, PackedEmbedding
from hetero.models.norm import exact_norm
from hetero.models.probe import probe_hidden
from hetero.models.rotary import RotaryTable, rotary_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Placement:
    """How a model was placed: kept as `model.hetero`.

    Attributes:
        device: where the dense parts live; experts are always in RAM.
        experts: weight format of the experts.
        dense: weight format of the dense linears, or "torch".
        inexact: parts whose result for one token may depend on the batch; empty means bit-exact.
    """

    device: str
    experts: str
    dense: str
    inexact: list[str] = field(default_factory=list)


def make_exact(model: PreTrainedModel) -> list[str]:
    """Replace norms, activations, rotary tables, routers and the tied head of a CPU model; returns what
    stays inexact."""
    decoder = model.get_decoder()
    names = {id(module): name for name, module in model.named_modules()}
    for module in list(decoder.modules()):
        norm = exact_norm(module)
        kind = activation_kind(module)
        if norm is not None:
            replace_module(model, names[id(module)], norm)
        elif kind is not None:
            replace_module(model, names[id(module)], HeteroActivation(kind))
    replace_rotary(model)
    _share_tied_head(model)

    def run() -> None:
        probe_hidden(model)

    for module in callers(model, run):
        run_exactly(module)
    return inexact(model, run)


def replace_rotary(model: PreTrainedModel) -> None:
    """Look rotary angles up in tables."""
    for name, module in list(model.named_modules()):
        if "rotaryembedding" in type(module).__name__.lower() and not isinstance(module, RotaryTable):
            replace_module(model, name, RotaryTable(module, rotary_limit(module)))


def _share_tied_head(model: PreTrainedModel) -> None:
    """Pack a tied head once and read the embeddings from it; a special embedding class keeps its own
    table."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or f"{_name(model, head)}.weight" not in model.all_tied_weights_keys:
        return
    linear = HeteroLinear.like(head)
    linear.pack(head.weight)
    if head.bias is not None:
        linear.bias = nn.Parameter(head.bias.detach().float(), requires_grad=False)
    dtype = model.dtype
    replace_module(model, _name(model, head), linear)
    if type(table) is nn.Embedding and linear.packed is not None:
        replace_module(model, _name(model, table), PackedEmbedding(linear.packed, dtype))


def _name(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
