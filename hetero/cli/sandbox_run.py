"""`hetero sandbox run`."""

from __future__ import annotations

import sys
from pathlib import Path

from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.sandbox import Sandbox


def run(
    argv: list[str],
    image: Path | None,
    timeout: float | None,
    memory_mb: int,
    stdin: bool,
    tier: str,
    min_isolation: str,
) -> int:
    """The command's status; its output goes to ours as it comes."""
    policy = Policy(limits=Limits(wall_s=timeout, memory_mb=memory_mb))
    given = sys.stdin.buffer.read() if stdin else None
    with Sandbox.create(image, policy=policy, tier=tier, min_isolation=min_isolation) as box:
        process = box.exec(argv, stdin=given, background=True)
        if given is not None:
            process.write(b"", end=True)
        for name, data in process:
            stream = sys.stdout if name == "stdout" else sys.stderr
            stream.buffer.write(data)
            stream.flush()
        result = process.wait()
    if result.exit in (126, 127) and result.stderr.startswith("sandbox: "):
        sys.stderr.write(result.stderr)
    if result.reason:
        sys.stderr.write(f"sandbox: ended by its limit: {result.reason}\n")
    return result.status
