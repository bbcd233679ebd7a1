"""Reward functions that do all that reward functions should not do; the completion says what."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path


def by_name(prompts, completions, **columns):
    return [_one(completion) for completion in completions]


def _one(completion):
    if completion.startswith("sleep "):
        time.sleep(float(completion.split()[1]))
        return 1.0
    if completion.startswith("value "):
        return float(completion.split()[1])
    return {
        "hang": lambda: time.sleep(1000),
        "hang in C": lambda: __import__("re").match(r"(a+)+$", "a" * 40 + "b"),
        "hang deaf": _deaf,
        "raise": lambda: 1 / 0,
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(1),
        "interrupt": _interrupt,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "abort": os.abort,
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "inf": lambda: "inf",
        "text": lambda: "x" * 50_000_000,
        "print": _print_much,
        "true": lambda: True,
        "dict": lambda: {"reward": 0.5, "acc": 1, "note": "n", "bad": float("nan")},
        "empty dict": lambda: {"acc": 1},
        "scribble": _scribble,
        "children": _start_children,
        "fork": lambda: _fork(lambda: 0.0),
        "fork and exit": lambda: _fork(lambda: sys.exit(0)),
    }[completion]()


def _fork(in_child):
    """1 if the child came to its end as a program does, -1 if not."""
    child = os.fork()
    if child == 0:
        return in_child()
    return 1.0 if os.waitpid(child, 0)[0] == child else -1.0


def _deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def _interrupt():
    raise KeyboardInterrupt


def _print_much():
    print("y" * 50_000_000)
    sys.stderr.write("z" * 1_000_000)
    return 1.0


def _scribble():
    """Write nonsense to every descriptor there is."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    return 1.0


def _start_children():
    """Leave processes behind, one of them in a session of its own, then hang."""
    for options in ({}, {"start_new_session": True}):
        subprocess.Popen(["sleep", "987654"], **options)
    time.sleep(1000)


def torch_loaded(completions, **columns):
    return [float("torch" in sys.modules or "numpy" in sys.modules) for _ in completions]


def memory_mb(completions, **columns):
    status = Path("/proc/self/status").read_text()
    return [float(status.split("VmRSS:")[1].split()[0]) / 1024 for _ in completions]


def pid(completions, **columns):
    return [float(os.getpid()) for _ in completions]


def wrong_count(completions, **columns):
    return [1.0, 2.0]


def not_a_list(completions, **columns):
    return 1.0


def as_array(completions, **columns):
    class Array:
        def tolist(self):
            return [0.25] * len(completions)

    return Array()


def strict(prompts, completions, answer):
    """Takes neither **columns nor anything that it does not name."""
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def everything(
    prompts, completions, completion_ids, trainer_state, log_metric, log_extra, answer, bonus=0, **columns
):
    log_metric("seen", len(completion_ids[0]))
    log_extra("column", ["x"])
    assert set(columns) == {"other"}, columns
    return [trainer_state.global_step + bonus + float(answer[0])]


def rank(prompts, completions, **columns):
    """Compares the completions of a group, so it must see them together."""
    assert len(set(prompts)) == 1
    return [float(sorted(completions).index(c)) for c in completions]


async def waits(completions, seconds=0.3, **columns):
    if completions[0] == "block":
        time.sleep(1000)
    if completions[0] == "raise":
        raise ValueError("async trouble")
    await asyncio.sleep(1000 if completions[0] == "hang" else seconds)
    return [1.0]


class Judge:
    def __init__(self, value=0.75):
        self.value = value

    def __call__(self, completions, **columns):
        return [self.value] * len(completions)


def scaled(completions, factor, **columns):
    return [factor * len(c) for c in completions]


twice = partial(scaled, factor=2)
