"""Kernels: `cpu` (typed wrappers of the extension), `ops` (differentiable), `reference` (the oracle)."""
