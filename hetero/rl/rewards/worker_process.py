"""A reward worker as its supervisor sees it: a child process, a socket, the jobs it has, a deadline."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from hetero.rl.rewards import processes
from hetero.rl.rewards.wire import Inbox, Outbox, frame
from hetero.rl.rewards.worker import serve

_MANY_DESCRIPTORS = 4096
_LONGEST_ANSWER = 1 << 24


@dataclass
class Job:
    """A call of a function: its number, the function's, its packed arguments.

    alone: it was in a bundle that had to be ended; on its own now, to see whether it was the culprit.
    """

    number: int
    function: int
    body: bytes
    alone: bool = False


class WorkerProcess:
    """Forks a worker of this process, which must be single-threaded.

    Attributes:
        ready: whether it has loaded the functions.
        jobs: what it was given and has not answered.
        deadline: when the answer (or, at first, being ready) is due, on the monotonic clock.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._sock, theirs = socket.socketpair()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become_worker(theirs.fileno(), supervisor, config)
        theirs.close()
        self._sock.setblocking(False)
        self.inbox = Inbox(self._sock.fileno(), _LONGEST_ANSWER)
        self.outbox = Outbox(self._sock.fileno())
        self.ready = False
        self.jobs: dict[int, Job] = {}
        self.deadline = time.monotonic() + config["startup_timeout"]
        self._babbles = False

    @property
    def is_free(self) -> bool:
        """Whether it can take jobs."""
        return self.ready and not self.jobs

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return not self.is_free and time.monotonic() >= self.deadline

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone or cannot be understood."""
        return not self.inbox.open or processes.has_ended(self.pid)

    def give(self, jobs: list[Job], seconds: float) -> None:
        """Hand over jobs of one function, to be answered within `seconds`."""
        self.jobs = {job.number: job for job in jobs}
        self.deadline = time.monotonic() + seconds
        header = {
            "function": jobs[0].function,
            "ids": list(self.jobs),
            "sizes": [len(job.body) for job in jobs],
        }
        self.outbox.put(frame(header, b"".join(job.body for job in jobs)))

    def hear(self) -> list[dict[str, Any]]:
        """What it has to say: that it is ready, or answers to jobs that it has."""
        heard = []
        try:
            for header, _ in self.inbox.receive():
                if header["kind"] == "ready":
                    self.ready = True
                    heard.append(header)
                elif self.jobs.pop(header["id"], None) is not None:
                    heard.append(header)
        except (ValueError, KeyError, TypeError):
            self.inbox.open, self._babbles = False, True  # user code wrote to our socket
        return heard

    def last_words(self) -> list[dict[str, Any]]:
        """Everything that it said before it ended."""
        heard = []
        while self.inbox.open and select.select([self.inbox.fd], [], [], 0)[0]:
            heard += self.hear()
        return heard

    def end(self) -> str:
        """Kill it and all that it started; says how it had ended before, if it had."""
        processes.kill_tree(self.pid)
        how = processes.reap(self.pid)
        self._sock.close()
        return "sent what is no answer" if self._babbles else how


def _become_worker(sock: int, supervisor: int, config: dict[str, Any]) -> None:
    """In the new process: cut every tie but the socket, and serve. Never returns."""
    status = 1
    try:
        processes.die_with(supervisor)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        fd = os.dup(sock)
        log = os.open(config["log"] or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for new, old in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(new, old)
        os.closerange(3, fd)
        os.closerange(fd + 1, _MANY_DESCRIPTORS)
        serve(fd, config)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)
