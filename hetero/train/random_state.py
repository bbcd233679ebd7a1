"""The global random streams of this process as JSON values, so that a resumed run draws what it would have
drawn.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_random_state(seed: int) -> None:
    """Begin the same streams anew, so that a run does not depend on what this process did before."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """Python's, NumPy's, PyTorch's CPU and, when initialised, CUDA generators. hetero's own sampling uses
    none of them.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Undo of `get_random_state`. CUDA streams are restored when this machine has as many devices."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_decode(text) for text in state["cuda"]])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
