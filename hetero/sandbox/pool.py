"""Warm boxes, and two different limits: how many live (memory) and how many run a command (cores)."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.errors import ArgumentError
from hetero.sandbox.aio import AsyncSandbox, threaded
from hetero.sandbox.errors import SandboxDead
from hetero.sandbox.image import Image
from hetero.sandbox.policy import Policy
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot


@dataclass
class PoolStats:
    """Counters since the pool began; seconds."""

    leased: int = 0
    warm_hits: int = 0
    created: int = 0
    create_failures: int = 0
    queue_wait_s: list[float] = field(default_factory=list)


class Pool:
    """Boxes of one image or one snapshot, ready before they are needed.

    A lease waits for its turn when `max_live` boxes are out (first come, first served): load makes callers
    wait, it never fails them. A leased box is used once and closed. Use in `async with`.

    Args:
        image: an image, or a Snapshot to fork from.
        warm: (low, high): below `low` idle boxes, make more until there are `high`.
        max_live: boxes at once, idle ones included.
        max_running: commands at once, over all leased boxes; by default one per core.
        tier: what holds the boxes in, as for Sandbox.create; a snapshot's boxes have its own.
    """

    def __init__(
        self,
        image: Image | Snapshot[Sandbox] | str | Path | None = None,
        policy: Policy | None = None,
        *,
        warm: tuple[int, int] = (2, 4),
        max_live: int = 256,
        max_running: int | None = None,
        tier: str = "ns",
    ) -> None:
        low, high = warm
        if not 0 <= low <= high <= max_live:
            raise ArgumentError(f"warm={warm} must rise and stay within max_live={max_live}.")
        self.image, self.policy, self.warm, self.max_live, self.tier = image, policy, warm, max_live, tier
        self.max_running = max_running or len(os.sched_getaffinity(0))
        self.stats = PoolStats()
        self._idle: deque[Sandbox] = deque()
        self._live = asyncio.Semaphore(max_live)
        self._running = asyncio.Semaphore(self.max_running)
        self._wanted = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Pool:
        self._filler = asyncio.create_task(self._fill())
        self._wanted.set()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        self._wanted.set()
        if self._filler is not None:
            await self._filler
        while self._idle:
            await threaded(self._idle.popleft().close)
            self._live.release()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[AsyncSandbox]:
        """A box for the time of the block. Raises what making a box raises."""
        started = time.monotonic()
        box = await self._take()
        self.stats.leased += 1
        self.stats.queue_wait_s.append(time.monotonic() - started)
        try:
            yield AsyncSandbox(box, self._running)
        finally:
            await asyncio.shield(self._return(box))

    async def _take(self) -> Sandbox:
        if self._closed or self._filler is None:
            raise SandboxDead("The pool is not open; use it in `async with`.")
        while self._idle:
            box = self._idle.popleft()
            self._wanted.set()
            if box.state == "live":
                self.stats.warm_hits += 1
                return box
            self._live.release()
        await self._live.acquire()
        if self._idle:  # one was returned to idle while we waited
            self._live.release()
            return await self._take()
        try:
            return await self._make()
        except BaseException:
            self._live.release()
            raise

    async def _return(self, box: Sandbox) -> None:
        try:
            await threaded(box.close)
        finally:
            self._live.release()
            self._wanted.set()

    async def _make(self) -> Sandbox:
        make: Callable[[], Any]
        if isinstance(self.image, Snapshot):
            snapshot = self.image
            make = lambda: snapshot.fork(1)[0]  # noqa: E731
        else:
            image = self.image
            options: dict[str, Any] = {"policy": self.policy, "tier": self.tier, "min_isolation": self.tier}
            make = lambda: Sandbox.create(image, **options)  # noqa: E731
        box: Sandbox = await threaded(make)
        self.stats.created += 1
        return box

    async def _fill(self) -> None:
        """Keep the pool between its watermarks; never takes the last places from those who wait."""
        low, high = self.warm
        while not self._closed:
            await self._wanted.wait()
            self._wanted.clear()
            if len(self._idle) >= low and self.stats.leased:
                continue
            while len(self._idle) < high and not self._closed and not self._live.locked():
                await self._live.acquire()
                try:
                    self._idle.append(await self._make())
                except Exception:
                    self._live.release()
                    self.stats.create_failures += 1
                    break  # whoever leases next gets the error itself
