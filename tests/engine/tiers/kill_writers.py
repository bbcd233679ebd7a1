"""Starts a process that writes blocks, kills it at a random moment, reads what is there; again and again.

    python kill_writers.py DIRECTORY ROUNDS SEED

Prints one JSON object: rounds, blocks served whole, blocks served with wrong bytes, files refused.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from hashlib import shake_128

import numpy as np

from hetero.engine.tiers.block_file import BlockName
from hetero.engine.tiers.directory import BlockDirectory

ROOT = bytes(range(16))
BYTES = 48 * 1024
NUM_NAMES = 60
BUDGET = 30 * (BYTES + 100)  # writers have to remove files too


def name(i: int) -> BlockName:
    return BlockName(ROOT, i.to_bytes(16, "big"))


def payload(i: int) -> np.ndarray:
    return np.frombuffer(shake_128(i.to_bytes(4, "big")).digest(BYTES), np.uint8)


def write_for_ever(path: str, seed: int) -> None:
    rng, directory = random.Random(seed), BlockDirectory(path, budget=BUDGET, bytes_per_block=BYTES)
    while True:
        i = rng.randrange(NUM_NAMES)
        directory.store(name(i), PAYLOADS[i])


PAYLOADS = [payload(i) for i in range(NUM_NAMES)]


def main(path: str, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    served = wrong = refused = 0
    directory = BlockDirectory(path, budget=BUDGET, bytes_per_block=BYTES)
    out = np.empty(BYTES, np.uint8)
    for round_ in range(rounds):
        writer = os.fork()
        if writer == 0:
            write_for_ever(path, seed * rounds + round_)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        for i in rng.sample(range(NUM_NAMES), 20):
            found = directory.load(name(i), out)
            served += found is True
            refused += found is False
            wrong += found is True and not np.array_equal(out, PAYLOADS[i])
    print(json.dumps({"rounds": rounds, "served": served, "wrong": wrong, "refused": refused}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
