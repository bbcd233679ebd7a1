"""`hetero sandbox shell`: bash on a terminal of its own, never on ours."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import termios
import tty
from pathlib import Path

from hetero.sandbox.policy import Limits, Policy
from hetero.sandbox.process import Process
from hetero.sandbox.sandbox import Sandbox


def run(image: Path | None, tier: str, min_isolation: str) -> int:
    """The shell's status."""
    ours, theirs = os.openpty()
    if sys.stdin.isatty():
        size = os.get_terminal_size(sys.stdin.fileno())
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    policy = Policy(limits=Limits(wall_s=None))
    with Sandbox.create(image, policy=policy, tier=tier, min_isolation=min_isolation) as box:
        term = {"TERM": os.environ.get("TERM", "dumb"), "PS1": r"sandbox:\w\$ "}
        process = box.exec(["bash", "--norc", "-i"], background=True, env=term, tty=theirs)
        os.close(theirs)
        _relay(process, ours)
        return process.wait().status


def _relay(process: Process, terminal: int) -> None:
    inn, out = sys.stdin.fileno(), sys.stdout.fileno()
    before = termios.tcgetattr(inn) if os.isatty(inn) else None
    if before is not None:
        tty.setraw(inn)
    sources = [inn, terminal]
    try:
        while True:
            ready, _, _ = select.select(sources, [], [], 0.2)
            if terminal in ready:
                try:
                    data = os.read(terminal, 65_536)
                except OSError:  # nobody has the terminal open any more
                    return
                os.write(out, data)
            elif not process.running:
                return
            if inn in ready:
                data = os.read(inn, 65_536)
                os.write(terminal, data or b"\x04")
                if not data:
                    sources.remove(inn)
    finally:
        os.close(terminal)
        if before is not None:
            termios.tcsetattr(inn, termios.TCSADRAIN, before)
