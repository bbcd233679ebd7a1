"""Weight conversions that pack tensors as they come off the disk, one expert at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from hetero.errors import ModelError, ShapeError
from hetero.models.codings import CodedStack
from hetero.models.experts import HeteroExperts
from hetero.models.lazy import Codes
from hetero.models.linear import HeteroLinear
from hetero.models.mapped_files import PageKeeper

pages = PageKeeper()


class Pack(ConversionOps):
    """The quantize operation: takes one whole converted tensor and packs it into the module that it is
    for."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        model, missing = kwargs["model"], kwargs["missing_keys"]
        for name, value in list(input_dict.items()):
            tensor = value[0] if isinstance(value, list) else value
            module, child = owner(model, name)
            if isinstance(module, HeteroExperts):
                with named(name):
                    _add(module, child, tensor)
                module.arrived(child)
            elif isinstance(module, HeteroLinear):
                with named(name):
                    module.pack(tensor)
            else:
                raise ModelError(f"{name} is not a tensor that hetero packs")
            if not isinstance(tensor, Codes):
                pages.packed(tensor.nbytes)
            if missing is not None:
                missing.discard(name)
        return {}


class PackEachExpert(WeightConverter):
    """Packs per-expert checkpoint tensors one at a time, where Transformers would stack a whole layer first.

    Stands for the conversions "merge a module list" and "merge two module lists, then concatenate gate and
    up".
    """

    __slots__ = ()

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> Any:
        module, child = owner(model, layer_name)
        loads = {source: tensors for source, tensors in self.collected_tensors.items() if tensors}
        lazy = all(callable(tensor) for group in loads.values() for tensor in group)
        if not isinstance(module, HeteroExperts) or not lazy:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        groups = [loads[source] for source in self.source_patterns if source in loads]
        if [len(group) for group in groups] != [module.num_experts] * len(self.source_patterns):
            got = {source: len(loads.get(source, ())) for source in self.source_patterns}
            raise ModelError(
                f"{layer_name}: the checkpoint holds {got} experts, expected {module.num_experts} of each"
            )
        for index, parts in enumerate(zip(*groups, strict=True)):
            tensors = [part() for part in parts]
            weights: list[Any] = [t.weight if isinstance(t, Codes) else t for t in tensors]
            with named(f"{layer_name}, expert {index}"):
                module.builder.add_expert(child, index, *weights)
            pages.packed(sum(tensor.nbytes for tensor in tensors))
        self.collected_tensors.clear()
        module.arrived(child)
        if loading_info is not None:
            loading_info.missing_keys.discard(layer_name)
        return {}


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Say which tensor of the checkpoint it is that cannot be packed."""
    try:
        yield
    except ShapeError as error:
        raise ModelError(f"{what} cannot be packed: {error}") from error


def _add(module: HeteroExperts, name: str, tensor: Any) -> None:
    """Pack a tensor that holds all experts of a layer."""
    stack: Any = tensor.weight if isinstance(tensor, Codes) else tensor
    if not isinstance(stack, CodedStack):
        module.builder.add(name, stack)
        return
    if stack.count != module.num_experts:
        raise ModelError(f"{name} holds {stack.count} experts, expected {module.num_experts}")
    for index in range(stack.count):
        module.builder.add_expert(name, index, stack.read(index))
        pages.packed(stack.nbytes // stack.count)


def owner(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The module that holds the parameter called `name`, and its name there; (None, name) when there is
    none."""
    path, _, child = name.rpartition(".")
    try:
        return model.get_submodule(path), child
    except AttributeError:
        return None, name


def streamed(converter: Any) -> Any:
    """`converter`, or its streaming twin when it does nothing but stack experts."""
    operations = getattr(converter, "operations", None)
    if type(converter) is not WeightConverter or not operations or not _stacks(operations):
        return converter
    twin = PackEachExpert(
        list(converter._original_source_patterns),
        list(converter._original_target_patterns),
        operations=list(operations),
        force_cpu=True,
    )
    twin.scope_prefix, twin.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return twin


def _stacks(operations: list[Any]) -> bool:
    merge, *rest = operations
    if not isinstance(merge, MergeModulelist) or merge.dim != 0 or len(rest) > 1:
        return False
    return not rest or (isinstance(rest[0], Concatenate) and rest[0].dim == 1)
