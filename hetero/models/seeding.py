"""Random numbers that depend on a seed and a name only, never on the order in which modules are visited."""

from __future__ import annotations

import hashlib

import torch


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the tensor called `name` under `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
