"""Typed wrappers of the C++ extension: the only importer of `hetero._C`."""

from __future__ import annotations

from hetero.kernels.cpu.context import Context, context, isa, isas, kernels, using

__all__ = ["Context", "context", "isa", "isas", "kernels", "using"]
