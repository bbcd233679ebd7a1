"""Threads, instruction set and scratch memory of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hetero import _C
from hetero.errors import ArgumentError, UnavailableError

EXTENSION = Path(_C.__file__)
"""The file that holds the kernels."""

MOST_NODES = 64


class Context:
    """A thread pool, the kernels of one instruction set, and scratch memory that grows and is reused.

    Args:
        threads: worker threads; None is one per physical core that this process may use (affinity mask,
            cgroup quota).
        isa: instruction set, one of `isas(emulated=True)`; None is what `HETERO_ISA` names, else the best.
        nodes: memory nodes that threads and the panels of weights lie on, no more than threads; None is what
            `HETERO_NUMA_NODES` says, else those of the machine. Another number than the machine's treats it
            as if it had so many. It changes no bit of any result.

    Raises:
        UnavailableError: the instruction set is unknown or this processor cannot run it.
        ArgumentError: `HETERO_NUMA_NODES` is no number from 1 to 64.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None, nodes: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}; expected at least 1, or None for one per physical core")
        if nodes is not None and not 1 <= nodes <= MOST_NODES:
            raise ValueError(
                f"nodes is {nodes}; expected 1 to {MOST_NODES}, or None for those of the machine"
            )
        try:
            self.handle = _C.Context(threads or 0, isa or "", nodes or 0)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        except RuntimeError as error:
            raise UnavailableError(str(error)) from None

    @property
    def threads(self) -> int:
        return self.handle.num_threads

    @property
    def isa(self) -> str:
        return self.handle.isa

    @property
    def nodes(self) -> int:
        return self.handle.num_nodes

    def __repr__(self) -> str:
        return f"Context(threads={self.threads}, isa={self.isa!r}, nodes={self.nodes})"


_default: list[Context] = []
_current: ContextVar[Context | None] = ContextVar("hetero_kernels_context", default=None)


def context() -> Context:
    """The context that kernels run in: the innermost `using`, else one made for the process on first use."""
    current = _current.get()
    if current is not None:
        return current
    if not _default:
        _default.append(Context())
    return _default[0]


@contextmanager
def using(ctx: Context) -> Iterator[Context]:
    """Run the kernels called inside the `with` block in `ctx`. PyTorch's backward threads do not see it:
    operations remember the context of their forward."""
    token = _current.set(ctx)
    try:
        yield ctx
    finally:
        _current.reset(token)


def isa() -> str:
    """Name of the instruction set in use."""
    return context().isa


def isas(emulated: bool = False) -> list[str]:
    """Instruction sets that run here, plainest first; `emulated` adds those that only tests use."""
    return [name for name, runs, is_emulated in _C.isas() if runs and (emulated or not is_emulated)]


def kernels() -> list[str]:
    """Names of the functions that exist once per instruction set."""
    return _C.kernels()
