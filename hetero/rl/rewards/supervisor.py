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
import time
from collections import deque
from typing import Any

from hetero.rl.rewards import processes
from hetero.rl.rewards.wire import Inbox, Outbox, frame
from hetero.rl.rewards.worker_process import Job, WorkerProcess

_GRACE = 2.0
"""Seconds beyond the time limit for functions that keep it themselves (asynchronous ones)."""
_TICK = 1.0
"""Seconds between two looks at whether the trainer is still there."""
_MAX_FAILED_STARTS = 3


class Supervisor:
    """See the module. `inbox` and `trainer_out` come from and go to the trainer."""

    def __init__(self, config: dict[str, Any], inbox: Inbox, trainer_out: int) -> None:
        self.config = config
        self.inbox = inbox
        self.trainer = Outbox(trainer_out)
        self.queue: deque[Job] = deque()
        self.workers: list[WorkerProcess] = []
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
                self._exchange()
                self._look_after_workers()
        finally:
            for worker in self.workers:
                processes.kill_tree(worker.pid)
            processes.end_all_descendants()

    @property
    def _gave_up(self) -> bool:
        return self.failed_starts >= _MAX_FAILED_STARTS

    def _start_workers(self) -> None:
        while len(self.workers) < self.config["num_workers"] and not self._gave_up:
            self.workers.append(WorkerProcess(self.config))

    def _dispatch(self) -> None:
        while self._gave_up and not self.workers and self.queue:
            self._fail(self.queue.popleft(), "crash", "no reward worker can be started any more")
        for worker in self.workers:
            if worker.is_free and self.queue:
                jobs = self._next_jobs()
                worker.give(jobs, self.config["timeout"] + (_GRACE if self._is_async(jobs[0]) else 0))

    def _is_async(self, job: Job) -> bool:
        return self.functions is not None and bool(self.functions[job.function]["is_async"])

    def _next_jobs(self) -> list[Job]:
        """The next job. An asynchronous function takes its share of the waiting ones along."""
        first = self.queue.popleft()
        if first.alone or not self._is_async(first):
            return [first]
        jobs, rest = [first], deque[Job]()
        share = min(self.config["max_concurrent"], 1 + len(self.queue) // len(self.workers))
        while self.queue:
            job = self.queue.popleft()
            fits = job.function == first.function and not job.alone and len(jobs) < share
            (jobs if fits else rest).append(job)
        self.queue = rest
        return jobs

    def _exchange(self) -> None:
        """Sleep until something can be read or written, a child ends or a deadline passes."""
        now = time.monotonic()
        soonest = min((w.deadline for w in self.workers if not w.is_free), default=now + _TICK)
        poll = select.poll()
        for fd in (self.wake, self.inbox.fd, *(worker.inbox.fd for worker in self.workers)):
            poll.register(fd, select.POLLIN)
        for worker in self.workers:
            if worker.outbox.waiting:
                poll.register(worker.outbox.fd, select.POLLIN | select.POLLOUT)  # the same socket
        if self.trainer.waiting:
            poll.register(self.trainer.fd, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(1 + 1000 * max(0.0, min(_TICK, soonest - now)))}
        if self.wake in ready:
            os.read(self.wake, 4096)
        for out in (self.trainer, *(worker.outbox for worker in self.workers)):
            if out.fd in ready and out.waiting:
                out.flush()
        if self.inbox.fd in ready:
            self.queue.extend(
                Job(header["id"], header["function"], body) for header, body in self.inbox.receive()
            )
        for worker in self.workers:
            if worker.inbox.fd in ready:
                self._pass_on(worker.hear())

    def _pass_on(self, heard: list[dict[str, Any]]) -> None:
        for header in heard:
            if header["kind"] == "ready":
                self.failed_starts = 0
                if self.functions is not None:
                    continue
                self.functions = header["functions"]
            self.trainer.put(frame(header))

    def _look_after_workers(self) -> None:
        for worker in list(self.workers):
            late = worker.is_late
            if late or worker.has_ended:
                if not late:
                    self._pass_on(worker.last_words())
                self._replace(worker, late=late)
        processes.reap_strays(worker.pid for worker in self.workers)

    def _replace(self, worker: WorkerProcess, *, late: bool) -> None:
        """End a worker and decide what becomes of its jobs; another one is started in its place."""
        how = worker.end()
        self.workers.remove(worker)
        if not worker.ready:
            limit = self.config["startup_timeout"]
            why = f"took longer than {limit:g} s" if late else f"ended the process, which {how}"
            self.failed_starts = _MAX_FAILED_STARTS if late else self.failed_starts + 1
            if self.functions is None and self._gave_up:
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

    def _fail(self, job: Job, kind: str, message: str) -> None:
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
    supervisor.queue.extend(Job(header["id"], header["function"], body) for header, body in messages[1:])
    supervisor.run()
    return 0
