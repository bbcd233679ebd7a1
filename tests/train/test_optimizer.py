"""AdamW and the gradient norm: the formula, bits that do not depend on threads, resuming."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

from hetero.errors import ArgumentError, CheckpointError, ModelError
from hetero.train.optimizer import AdamW, gradient_norm

SHAPES = {"small": (3,), "odd": (7, 13), "large": (70, 1001)}
"""The last one is longer than an update chunk and than PyTorch's threshold for splitting over threads."""


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(params: dict[str, Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator)


def run(params: dict[str, Parameter], optimizer: AdamW, steps: range, grad_scale: float = 0.3) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step(1e-2 / (step + 1), grad_scale)


def test_update_equals_torch_in_fp64() -> None:
    params = make()
    wide = {name: Parameter(p.detach().double()) for name, p in params.items()}
    ours = AdamW(params, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    theirs = torch.optim.AdamW(wide.values(), lr=1.0, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(5):
        give_gradients(params, step)
        for name, p in wide.items():
            p.grad = 0.3 * params[name].grad.double()
        theirs.param_groups[0]["lr"] = 1e-2
        theirs.step()
        ours.step(1e-2, 0.3)
    for name, p in wide.items():
        torch.testing.assert_close(
            params[name].double(), p, rtol=0, atol=3e-7 * float(p.detach().abs().max())
        )


def test_bits_do_not_depend_on_threads() -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params = make()
        run(params, AdamW(params, weight_decay=0.01), range(3))
        results.append((params, gradient_norm(params)))
    for params, norm in results[1:]:
        assert norm == results[0][1]
        for name, p in params.items():
            assert torch.equal(p, results[0][0][name]), name


def test_the_norm_of_the_change_is_returned() -> None:
    norms = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        params = make()
        before = {name: p.detach().double().clone() for name, p in params.items()}
        give_gradients(params, 0)
        norms.append(AdamW(params, weight_decay=0.1).step(1e-2, 0.3))
        moved = sum(float((p.detach().double() - before[n]).square().sum()) for n, p in params.items())
        assert norms[-1] == pytest.approx(math.sqrt(moved), rel=1e-5)
    assert norms[0] == norms[1]
    assert AdamW({}).step(1e-2) == 0.0


def test_resuming_gives_the_same_bits() -> None:
    straight = make()
    run(straight, AdamW(straight), range(6))
    first = make()
    optimizer = AdamW(first)
    run(first, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    second = {name: Parameter(p.detach().clone()) for name, p in first.items()}
    resumed = AdamW(second)
    resumed.load_state_dict(saved, optimizer.updates)
    run(second, resumed, range(3, 6))
    assert all(torch.equal(straight[name], second[name]) for name in straight)


def test_missing_gradient_counts_as_zero() -> None:
    with_zero, without = make(), make()
    for params in (with_zero, without):
        optimizer = AdamW(params)
        run(params, optimizer, range(1))
        give_gradients(params, 1)
        params["odd"].grad = None if params is without else torch.zeros(SHAPES["odd"])
        optimizer.step(1e-2)
    assert all(torch.equal(with_zero[name], without[name]) for name in SHAPES)


def test_updates_bump_tensor_versions() -> None:
    """The kernels' bf16 copies are refreshed when a master's version moves."""
    params = make()
    before = {name: p._version for name, p in params.items()}
    run(params, AdamW(params), range(1))
    assert all(p._version > before[name] for name, p in params.items())


def test_gradient_norm_is_exact_and_sees_every_element() -> None:
    params = make()
    give_gradients(params, 0)
    everything = torch.cat([p.grad.double().flatten() for p in params.values()])
    assert gradient_norm(params) == pytest.approx(math.sqrt(math.fsum((everything**2).tolist())), rel=1e-14)
    params["large"].grad[-1, -1] = math.nan
    assert math.isnan(gradient_norm(params))
    params["large"].grad[-1, -1] = -math.inf
    assert gradient_norm(params) == math.inf


def test_gradient_norm_survives_squares_beyond_fp32() -> None:
    params = {"p": Parameter(torch.zeros(4))}
    params["p"].grad = torch.full((4,), 1e30)
    assert gradient_norm(params) == pytest.approx(2e30, rel=1e-6)


def test_masters_must_be_fp32() -> None:
    with pytest.raises(ModelError, match="bfloat16"):
        AdamW({"p": Parameter(torch.zeros(3, dtype=torch.bfloat16))})


@pytest.mark.parametrize("kwargs", [{"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -1.0}])
def test_bad_settings_are_errors(kwargs: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        AdamW(make(), **kwargs)  # type: ignore[arg-type]


def test_state_of_another_model_is_refused_before_anything_is_written() -> None:
    params = make()
    optimizer = AdamW(params)
    other = {name: Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()} | {
        "more": Parameter(torch.zeros(2))
    }
    with pytest.raises(CheckpointError, match="more"):
        optimizer.load_state_dict(AdamW(other).state_dict(), 1)
    reshaped = optimizer.state_dict() | {"exp_avg.odd": torch.ones(13, 7)}
    with pytest.raises(CheckpointError, match=r"exp_avg\.odd"):
        optimizer.load_state_dict(reshaped, 1)
    assert optimizer.updates == 0
    assert not any(bool(tensor.any()) for tensor in optimizer.state_dict().values())
