"""Adapter versions side by side: what began under one is finished, or scored, under it after an update.

Only the factors exist several times, in the dtype that is computed with; the base weights are shared, and one
forward may hold rows of several versions (`adapters_by_rows`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn

from hetero.errors import ArgumentError, ModelError
from hetero.kernels import ops
from hetero.models.adapter_state import (
    Adaptable,
    Adapter,
    Factors,
    KeptVersion,
    RowFactors,
    adapter_of,
    computing_with,
)
from hetero.models.experts import HeteroExperts
from hetero.models.lora import lora_active
from hetero.models.lora_linear import LoraLinear

BASE = "base"
"""Key of the model without its adapter."""


def keep_versions(model: nn.Module, count: int) -> None:
    """Keep the newest `count` versions of the adapter in memory, the current one among them.

    Raises ArgumentError for a count under 1.
    """
    if count < 1:
        raise ArgumentError(f"keep_versions({count}); at least one version, the current one, is in memory")
    adapter_of(model).window = count
    adapter_of(model).trim()


def retain_version(model: nn.Module) -> None:
    """Keep the current version: to be called before the masters are written. No-op with a window of one."""
    adapter = adapter_of(model)
    key = _current_key(adapter)
    if adapter.window == 1 or key in adapter.kept or not adapter.modules:
        return
    factors = {name: _frozen(adapter.modules[name], own) for name, own in adapter.factors.items()}
    adapter.kept[key] = KeptVersion(adapter.version, key, factors)


def resident_versions(model: nn.Module) -> list[int]:
    """Numbers of the versions that can be computed with, oldest first, the current one last."""
    adapter = adapter_of(model)
    kept = [version.number for version in adapter.kept.values() if version.key != _current_key(adapter)]
    return [*kept, adapter.version]


def version_key(model: nn.Module, number: int | None = None) -> str:
    """Names the weights of a resident version, by default of what the model computes now; "base" for none.

    Equal keys promise equal bits: the key covers the number, the masters and every write to them, so that
    weights that changed without a new number never pass for the old ones. Raises ModelError for a version
    that is not resident.
    """
    adapter = adapter_of(model)
    if number is None:
        return _current_key(adapter) if lora_active(model) else BASE
    if number == adapter.version:
        return _current_key(adapter) if adapter.modules else BASE
    for version in reversed(adapter.kept.values()):
        if version.number == number:
            return version.key
    raise ModelError(
        f"version {number} of the adapter is not in memory; there are {resident_versions(model)}. "
        "keep_versions() says how many stay."
    )


def resident_keys(model: nn.Module) -> set[str]:
    """Keys of everything that `adapters_by_rows` can compute."""
    adapter = adapter_of(model)
    current = {_current_key(adapter)} if adapter.modules else set()
    return {BASE, *adapter.kept} | current


def is_adapted(model: nn.Module, module: nn.Module) -> bool:
    """Whether the adapter of `model` has factors on `module`."""
    return any(adapted is module for adapted in adapter_of(model).modules.values())


def computed_factors(model: nn.Module, key: str) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Module -> scale and factors of a resident version, rounded to what is computed with; {} for the base.

    A version that was current keeps these values when it has been left behind, or comes from a checkpoint.
    """
    adapter = adapter_of(model)
    return {
        name: (
            factors.scale,
            {p: t.detach().to(_dtype(adapter.modules[name])) for p, t in _parts(factors).items()},
        )
        for name, factors in _factors(adapter, key).items()
    }


@contextmanager
def adapter_at(model: nn.Module, number: int) -> Iterator[None]:
    """Within this context the model computes with a resident version, bit for bit as when it was current.

    Raises ModelError for a version that is not resident.
    """
    with computing_with(model, {**_factors(adapter_of(model), version_key(model, number))}):
        yield


@contextmanager
def adapters_by_rows(model: nn.Module, runs: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Within this context, which has no gradient, rows are computed under several versions at once.

    Args:
        runs: (key, number of rows) in the order of the rows of every forward inside. A row gets the bits that
            it has when its version computes alone.

    Raises ModelError for a key that is not resident.
    """
    if len(runs) == 1 and runs[0][0] == version_key(model):
        yield
        return
    adapter = adapter_of(model)
    versions = [_factors(adapter, key) for key, _ in runs]
    factors: dict[str, Factors | RowFactors] = {**versions[0]}
    if len(runs) > 1:
        ends = tuple(accumulate(rows for _, rows in runs))
        factors = {
            name: ops.Runs(tuple(version.get(name) for version in versions), ends)  # type: ignore[misc]
            for name in adapter.modules
        }
    with computing_with(model, factors):
        yield


def kept_tensors(model: nn.Module) -> dict[int, dict[str, Tensor]]:
    """Number -> factors of the kept versions, named like the masters: what a checkpoint needs of them."""
    return {
        version.number: {
            f"{name}.lora_{part}": tensor
            for name, factors in version.factors.items()
            for part, tensor in _parts(factors).items()
        }
        for version in adapter_of(model).kept.values()
    }


def restore_versions(model: nn.Module, versions: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Put back what `kept_tensors` gave, in place of all kept versions.

    Raises ModelError when the factors are not those of the model's adapter.
    """
    adapter = adapter_of(model)
    kept = {}
    for number, tensors in sorted(versions.items()):
        adapter.num_restored += 1
        key = f"policy:{number}:restored:{adapter.num_restored}"
        factors = {name: _like(name, own, tensors) for name, own in adapter.factors.items()}
        kept[key] = KeptVersion(number, key, factors)
    adapter.kept = kept
    adapter.trim()


def _current_key(adapter: Adapter) -> str:
    writes = sum(map(operator.attrgetter("_version"), adapter.masters))
    return f"policy:{adapter.version}:{len(adapter.modules)}:{writes}"


def _factors(adapter: Adapter, key: str) -> Mapping[str, Factors]:
    if key == BASE:
        return {}
    if key in adapter.kept:
        return adapter.kept[key].factors
    if key == _current_key(adapter):
        return adapter.factors
    raise ModelError(f"the adapter version {key} is not in memory any more; there are {sorted(adapter.kept)}")


def _frozen(module: Adaptable, factors: Factors) -> Factors:
    if isinstance(factors, ops.ExpertLoraFactors):
        assert isinstance(module, HeteroExperts), module
        assert module.store is not None, module
        return factors.frozen(module.store.packed)
    return factors.frozen(_dtype(module))


def _dtype(module: Adaptable) -> torch.dtype:
    """What the factors on `module` are computed with."""
    return module.weight.dtype if isinstance(module, LoraLinear) else torch.bfloat16


def _parts(factors: Factors) -> dict[str, Tensor]:
    names = ops.FACTORS if isinstance(factors, ops.ExpertLoraFactors) else ("a", "b")
    return {name: tensor for name in names if (tensor := getattr(factors, name)) is not None}


def _like(name: str, own: Factors, tensors: Mapping[str, Tensor]) -> Factors:
    """The factors of module `name` among `tensors`, made like the module's `own`."""
    found = {}
    for part, master in _parts(own).items():
        tensor = tensors.get(f"{name}.lora_{part}")
        if tensor is None or tensor.shape != master.shape:
            got = "nothing" if tensor is None else list(tensor.shape)
            want = list(master.shape)
            raise ModelError(f"a kept version has {got} for {name}.lora_{part}, expected {want}")
        found[part] = tensor.to(master.device)
    if isinstance(own, ops.ExpertLoraFactors):
        return ops.ExpertLoraFactors(**found, scale=own.scale)
    return ops.LoraFactors(found["a"], found["b"], own.scale)
