"""`hetero sandbox audit verify | show`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hetero.errors import ArgumentError
from hetero.sandbox import audit


def run(journal: Path, show: bool = False, as_json: bool = False) -> None:
    """Check a journal's chain, or print its events. Raises SandboxInfraError for a broken chain."""
    if not journal.is_file():
        raise ArgumentError(f"There is no journal {journal}.")
    if not show:
        count, last = audit.verify(journal)
        print(f"{count} events, chain holds, last hash {last}")
        return
    for event in audit.read(journal):
        print(json.dumps(event) if as_json else _line(event))


def _line(event: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    hidden = {"seq", "time", "monotonic", "sandbox", "event", "prev", "hash"}
    rest = " ".join(f"{key}={json.dumps(value)}" for key, value in event.items() if key not in hidden)
    return f"{event['seq']:6} {at} {event['sandbox']} {event['event']:8} {rest}"
