"""`hetero sandbox ls`."""

from __future__ import annotations

import json

from hetero.sandbox import store


def run(as_json: bool) -> None:
    """List runs with their boxes and layers."""
    runs = store.store_root() / "runs"
    for path in sorted(runs.glob("*/")) if runs.is_dir() else []:
        row = {
            "run": path.name,
            "owner_pid": int(path.name.partition("-")[0]),
            "boxes": sum(1 for _ in (path / "boxes").glob("*")),
            "layers": sum(1 for _ in (path / "layers").glob("*")),
        }
        print(
            json.dumps(row)
            if as_json
            else f"{row['run']}  owner {row['owner_pid']}  {row['boxes']} boxes  {row['layers']} layers"
        )
