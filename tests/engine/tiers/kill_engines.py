"""Kills engines at random moments while they write their KV cache to disk; asks another one after each.

    python kill_engines.py DIRECTORY ROUNDS SEED

Prints one JSON object: rounds, tokens served from disk, answers that were wrong, files refused.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from mock_runner import MockRunner, MockStore

from hetero.engine import Engine, SamplingParams
from hetero.engine.tiers.block_file import HEADER_BYTES

PARAMS = SamplingParams(max_tokens=3)
BUDGET = 150 * (MockStore.bytes_per_block + HEADER_BYTES)


def prompt(i: int) -> list[int]:
    return [(i + 7 * n * n + n) % 50 for n in range(200)]


def engine(path: str) -> Engine:
    made = Engine(MockRunner(30), kv_disk=path, kv_disk_size=BUDGET, prefill_chunk=64)
    made.stats.prefill_seconds += 1e6  # computing is never faster
    return made


def write_for_ever(path: str, seed: int) -> None:
    rng, writer = random.Random(seed), engine(path)
    while True:
        writer.generate([prompt(rng.randrange(50))], PARAMS)


def ask(path: str, seed: int) -> dict[str, int]:
    reader, wrong = engine(path), 0
    for i in random.Random(seed).sample(range(50), 10):
        done = reader.generate([prompt(i)], PARAMS)[0]
        wrong += (done.token_ids, done.logprobs) != MockRunner(30).expect(prompt(i), PARAMS, (0, 0))
    stats = reader.stats
    return {"served": stats.disk_in_time, "wrong": wrong, "refused": stats.disk_refused}


def forked(path: str, seed: int) -> dict[str, int]:
    """`ask` in a process of its own: this one has no threads, so that it can be forked."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(ask(path, seed)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        found: dict[str, int] = json.loads(pipe.read())
    return found


def main(path: str, rounds: int, seed: int) -> None:
    rng, total = random.Random(seed), {"rounds": rounds, "served": 0, "wrong": 0, "refused": 0}
    for round_ in range(rounds):
        writer = os.fork()
        if writer == 0:
            write_for_ever(path, seed * rounds + round_)
        time.sleep(rng.uniform(0, 0.3))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        for name, count in forked(path, round_).items():
            total[name] += count
    print(json.dumps(total))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
