"""`hetero sandbox gc`."""

from __future__ import annotations

import json

from hetero.sandbox import store
from hetero.sandbox.oci import cache

_DAY_S = 86_400


def run(image_days: float, as_json: bool) -> None:
    """Remove runs without an owner, and layers of images that nobody has used for so long."""
    removed = store.sweep()
    layers = cache.collect(image_days * _DAY_S)
    if as_json:
        print(json.dumps({"removed": removed, "layers": layers}))
    else:
        print(f"removed {len(removed)} left-over run(s) and {len(layers)} layer(s) of images")
