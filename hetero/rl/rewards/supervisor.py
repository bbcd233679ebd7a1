"""The reward supervisor: one small single-threaded process between the trainer and the workers.

It alone starts workers (a fork of a process that holds nothing but the standard library, so a new one is
there in a millisecond and no thread of the trainer is ever forked), hands them jobs, ends what takes too
long, and ends everything when the trainer is gone. It never runs user code, so it cannot hang.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hetero.rl.rewards import processes
from hetero.rl.rewards.wire import Inbox, Outbox, frame
from hetero.rl.rewards.worker import serve

_GRACE = 2.0
"""Seconds beyond the time limit for functions that keep it themselves (asynchronous ones)."""
_TICK = 1.0
_MAX_FAILED_STARTS = 3
_MANY_DESCRIPTORS = 4096


@dataclass
class _Job:
    number: int
    function: int
    body: bytes
    alone: bool = (
        False  # it was in a bundle that had to be ended; on its own now, to see whether it was the culprit
    )


@dataclass
class _Worker:
    pid: int
    inbox: Inbox
    outbox: Outbox
    sock: socket.socket
    deadline: float
    ready: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)


class Supervisor:
    """See the module. `trainer_in` and `trainer_out` are descriptors to and from the trainer."""

    def __init__(self, config: dict[str, Any], inbox: Inbox, trainer_out: int) -> None:
        self.config = config
        self.inbox = inbox
        self.trainer = Outbox(trainer_out)
        self.queue: deque[_Job] = deque()
        self.workers: list[_Worker] = []
        self.functions: list[dict[str, Any]] | None = None
        self.failed_starts = 0
        self.parent = os.getppid()
        self.wake, wake_end = os.pipe()
        for fd in (self.wake, wake_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> None:
        """Serve until the trainer closes its end or is gone; then end every worker and what they started."""
        try:
            while self.inbox.open and os.getppid() == self.parent:
                self._start_workers()
                self._dispatch()
                self._wait()
                self._look_after_workers()
        finally:
            for worker in self.workers:
                processes.kill_tree(worker.pid)
            processes.end_all_descendants()

    def _start_workers(self) -> None:
        while len(self.workers) < self.config["num_workers"] and self.failed_starts < _MAX_FAILED_STARTS:
            ours, theirs = socket.socketpair()
            supervisor = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_worker(theirs, supervisor)
            theirs.close()
            ours.setblocking(False)
            deadline = time.monotonic() + self.config["startup_timeout"]
            self.workers.append(_Worker(pid, Inbox(ours.fileno()), Outbox(ours.fileno()), ours, deadline))

    def _become_worker(self, sock: socket.socket, supervisor: int) -> None:
        """In a new process: cut every tie but the socket, and serve. Never returns."""
        status = 1
        try:
            processes.die_with(supervisor)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            fd = os.dup(sock.fileno())
            log = os.open(self.config["log"] or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for new, old in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(new, old)
            os.closerange(3, fd)
            os.closerange(fd + 1, _MANY_DESCRIPTORS)
            serve(fd, self.config)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _dispatch(self) -> None:
        if self.failed_starts >= _MAX_FAILED_STARTS and not self.workers:
            while self.queue:
                self._fail(self.queue.popleft(), "crash", "no reward worker can be started any more")
        for worker in self.workers:
            if worker.ready and not worker.jobs and self.queue:
                jobs = self._next_jobs()
                worker.jobs = {job.number: job for job in jobs}
                is_async = self.functions is not None and self.functions[jobs[0].function]["is_async"]
                worker.deadline = time.monotonic() + self.config["timeout"] + (_GRACE if is_async else 0)
                header = {
                    "function": jobs[0].function,
                    "ids": list(worker.jobs),
                    "sizes": [len(j.body) for j in jobs],
                }
                worker.outbox.put(frame(header, b"".join(job.body for job in jobs)))

    def _next_jobs(self) -> list[_Job]:
        """The next job; an asynchronous function takes its share of the waiting ones with it, to wait for
        them together."""
        first = self.queue.popleft()
        if first.alone or self.functions is None or not self.functions[first.function]["is_async"]:
            return [first]
        jobs, rest = [first], deque[_Job]()
        share = min(self.config["max_concurrent"], 1 + len(self.queue) // len(self.workers))
        while self.queue:
            job = self.queue.popleft()
            fits = job.function == first.function and not job.alone and len(jobs) < share
            (jobs if fits else rest).append(job)
        self.queue = rest
        return jobs

    def _wait(self) -> None:
        """Sleep until there is something to read or write or a deadline passes, and read and write it."""
        busy = [w for w in self.workers if w.jobs or not w.ready]
        soonest = min((w.deadline for w in busy), default=time.monotonic() + _TICK)
        pause = max(0.0, min(_TICK, soonest - time.monotonic()))
        boxes = [self.inbox, *(worker.inbox for worker in self.workers if worker.inbox.open)]
        outboxes = [box for box in (self.trainer, *(worker.outbox for worker in self.workers)) if box.waiting]
        poll = select.poll()
        for fd in (self.wake, *(box.fd for box in boxes)):
            poll.register(fd, select.POLLIN)
        for out in outboxes:
            poll.register(out.fd, select.POLLOUT | (select.POLLIN if out is not self.trainer else 0))
        ready = {fd for fd, _ in poll.poll(pause * 1000 + 1)}
        if self.wake in ready:
            os.read(self.wake, 4096)
        for out in outboxes:
            if out.fd in ready:
                out.flush()
        if self.inbox.fd in ready:
            for header, body in self.inbox.receive():
                self.queue.append(_Job(header["id"], header["function"], body))
        for worker in self.workers:
            if worker.inbox.fd in ready:
                self._hear(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            for header, _ in worker.inbox.receive():
                if header["kind"] == "ready":
                    worker.ready = True
                    self.failed_starts = 0
                    if self.functions is None:
                        self.functions = header["functions"]
                        self.trainer.put(frame(header))
                elif worker.jobs.pop(header["id"], None) is not None:
                    self.trainer.put(frame(header))
        except (ValueError, KeyError, TypeError):
            worker.inbox.open = (
                False  # user code wrote to our socket; this worker cannot be understood any more
            )

    def _look_after_workers(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            late = (worker.jobs or not worker.ready) and now >= worker.deadline
            if late or not worker.inbox.open or processes.has_ended(worker.pid):
                while worker.inbox.open and not late:
                    self._hear(worker)  # answers that it gave before it ended
                    if not select.select([worker.inbox.fd], [], [], 0)[0]:
                        break
                self._end(worker, late=late)
        processes.reap_strays(worker.pid for worker in self.workers)

    def _end(self, worker: _Worker, *, late: bool) -> None:
        processes.kill_tree(worker.pid)
        how = processes.reap(worker.pid)
        worker.sock.close()
        self.workers.remove(worker)
        if not worker.ready:
            limit = self.config["startup_timeout"]
            why = f"took longer than {limit:g} s" if late else f"ended the process, which {how}"
            self.failed_starts = _MAX_FAILED_STARTS if late else self.failed_starts + 1
            if self.functions is None and self.failed_starts >= _MAX_FAILED_STARTS:
                self.trainer.put(
                    frame({"kind": "ready", "functions": None, "message": f"loading them {why}"})
                )
        jobs = list(worker.jobs.values())
        if len(jobs) > 1:
            for job in reversed(jobs):
                job.alone = True
                self.queue.appendleft(job)
        elif late:
            for job in jobs:
                self._fail(
                    job, "timeout", f"no answer within {self.config['timeout']:g} s; its process was ended"
                )
        else:
            for job in jobs:
                self._fail(job, "crash", f"its process {how}")

    def _fail(self, job: _Job, kind: str, message: str) -> None:
        self.trainer.put(frame({"kind": "result", "id": job.number, "failure": kind, "message": message}))


def main() -> int:
    """Read the configuration from standard input, then serve there and on standard output."""
    processes.adopt_orphans()
    os.set_blocking(1, False)
    inbox = Inbox(0)
    messages: list[tuple[dict[str, Any], bytes]] = []
    while inbox.open and not messages:
        messages += inbox.receive()
    if not messages:
        return 0
    supervisor = Supervisor(json.loads(messages[0][1]), inbox, 1)
    supervisor.queue.extend(_Job(header["id"], header["function"], body) for header, body in messages[1:])
    supervisor.run()
    return 0
