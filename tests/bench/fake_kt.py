"""A stand-in for kt-kernel's compiled part: its calls and its pointers, over our reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hetero.kernels import reference
from hetero.kernels.ops.expert_lora import FACTORS


def package(variant: str = "avx512_bf16", trains: bool = True) -> Any:
    """What `import kt_kernel` gives; `trains`: whether the variant has classes that train."""
    kinds = {"MOESFTConfig": Config, "AMXBF16_SFT_MOE": Layer, "AMXInt4_SFT_MOE": Adding}
    moe = SimpleNamespace(**kinds if trains else {"MOESFTConfig": Config})
    ext = SimpleNamespace(__cpu_variant__=variant, moe=moe, CPUInfer=Queue, WorkerPoolConfig=SimpleNamespace)
    return SimpleNamespace(kt_kernel_ext=ext)


class Queue:
    """Does at `sync` what was submitted."""

    def __init__(self, config: SimpleNamespace) -> None:
        assert len(config.subpool_thread_count) == config.subpool_count == 1
        self.backend_, self.tasks = object(), list[Callable[[], None]]()

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def sync(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class Config:
    """Sizes, and by attribute whatever else is set."""

    authoritative_optimizer_grads = False
    layer_idx = max_len = lora_rank = max_cache_depth = 0
    lora_alpha = 0.0
    gate_proj = up_proj = down_proj = physical_to_logical_map = 0
    pool: object = None

    def __init__(self, e: int, top_k: int, hidden: int, intermediate: int) -> None:
        self.e, self.top_k, self.hidden, self.intermediate = e, top_k, hidden, intermediate


class Layer:
    """Copies its weights at load; reads factors wherever it was last told."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def load_weights_task(self) -> Callable[[], None]:
        return self._load

    def _load(self) -> None:
        c = self.config
        assert c.pool is not None
        order = _at(c.physical_to_logical_map, (c.e,), torch.int64)
        assert order.tolist() == list(range(c.e))
        inner, outer = (c.e, c.intermediate, c.hidden), (c.e, c.hidden, c.intermediate)
        gate, up = (_at(pointer, inner).float() for pointer in (c.gate_proj, c.up_proj))
        self.gate_up, self.down = torch.cat([gate, up], dim=1), _at(c.down_proj, outer).float()

    def update_lora_weights(self, *factors: int) -> None:
        self.factors = factors

    def forward_sft_task(
        self, count: int, top_k: int, ids: int, weights: int, x: int, out: int, save: bool
    ) -> Callable[[], None]:
        def forward() -> None:
            c, tokens = self.config, int(_at(count, (1,), torch.int32))
            assert save
            assert tokens <= c.max_len
            assert top_k == c.top_k
            self.x = _at(x, (tokens, c.hidden)).float().requires_grad_()
            self.weights = _at(weights, (tokens, top_k), torch.float32).clone().requires_grad_()
            self.own = [own.float().requires_grad_() for own in self._like_factors(self.factors)]
            self.out = reference.experts(
                self.gate_up,
                self.down,
                self.x,
                _at(ids, (tokens, top_k), torch.int64),
                self.weights,
                lora=dict(zip(FACTORS, self.own, strict=True)),
                scale=c.lora_alpha / c.lora_rank,
            )
            _at(out, (tokens, c.hidden)).copy_(self.out.detach())

        return forward

    def backward_task(self, dout: int, dx: int, *rest: int) -> Callable[[], None]:
        factors, (dweights, *frozen, accumulate, scale) = rest[:6], rest[6:]
        assert (frozen, accumulate, scale) == ([0, 0, 0], False, 1.0)

        def backward() -> None:
            size = tuple(self.x.shape)
            inputs = (self.x, self.weights, *self.own)
            of_x, of_weights, *own = torch.autograd.grad(self.out, inputs, _at(dout, size).float())
            _at(dx, size).copy_(of_x)
            _at(dweights, tuple(self.weights.shape), torch.float32).copy_(of_weights)
            for target, gradient in zip(self._like_factors(factors), own, strict=True):
                self.put(target, gradient)

        return backward

    def put(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        assert self.config.authoritative_optimizer_grads
        target.copy_(gradient)

    def _like_factors(self, pointers: tuple[int, ...]) -> list[torch.Tensor]:
        c, r = self.config, self.config.lora_rank
        a, b = (c.e, r, c.hidden), (c.e, c.intermediate, r)
        sizes = (a, b, a, b, (c.e, r, c.intermediate), (c.e, c.hidden, r))
        return [_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


class Adding(Layer):
    """The class of four bits: gradients are added to what was there."""

    def put(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        assert not self.config.authoritative_optimizer_grads
        target.add_(gradient)


def _at(pointer: int, size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The tensor that lies there."""
    nbytes = torch.Size(size).numel() * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).view(size)
