"""A process that owns reward workers, for the doctor to kill: `python -m hetero.doctor.pool_owner`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hetero.rl.rewards import RewardPool, Sample
from hetero.rl.rewards.processes import descendants

SECONDS = 120
NUM_WORKERS = 2
NUM_PROCESSES = 1 + NUM_WORKERS + NUM_WORKERS
"""The supervisor, its workers, and a child of each worker."""


def hang(completions: list[str]) -> list[float]:
    """A reward function that starts a child and waits for it."""
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({SECONDS})"], check=False)
    return [0.0] * len(completions)


def main() -> None:
    """Keep workers busy, print "ready" and the process ids below this one, and wait to be killed."""
    with RewardPool(
        ["hetero.doctor.pool_owner:hang"],
        num_workers=NUM_WORKERS,
        timeout=SECONDS,
    ) as pool:
        for _ in range(NUM_WORKERS):
            pool.submit(Sample("?", "!", columns={}))
        while len(descendants(os.getpid())) < NUM_PROCESSES:
            time.sleep(0.01)
        sys.stdout.write(f"ready {' '.join(map(str, descendants(os.getpid())))}\n")
        sys.stdout.flush()
        time.sleep(SECONDS)


if __name__ == "__main__":
    main()
