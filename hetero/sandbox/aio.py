"""Sandboxes for asyncio: the same calls, awaited. Waiting is done by threads, as many as commands may run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hetero.sandbox.box_files import LARGEST_READ, Change, Entry
from hetero.sandbox.box_python import PythonResult
from hetero.sandbox.image import Image
from hetero.sandbox.isolation import Report
from hetero.sandbox.policy import Policy
from hetero.sandbox.process import Process
from hetero.sandbox.result import Result
from hetero.sandbox.sandbox import Sandbox
from hetero.sandbox.snapshot import Snapshot
from hetero.sandbox.template import Template

T = TypeVar("T")
_THREADS = ThreadPoolExecutor(512, thread_name_prefix="sandbox")


async def threaded(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The result of a blocking call. When the task is cancelled, the call goes on to its end unheard."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, functools.partial(function, *arguments, **named))


class AsyncSandbox:
    """A Sandbox whose methods are coroutines; `sync` is the box itself. See Sandbox for what they do."""

    def __init__(self, sync: Sandbox, running: asyncio.Semaphore | None = None) -> None:
        self.sync = sync
        self._running = running

    @classmethod
    async def create(
        cls,
        image: Image | str | Path | None = None,
        *,
        policy: Policy | None = None,
        tier: str = "ns",
        min_isolation: str = "ns",
        labels: Mapping[str, str] | None = None,
        template: Template | None = None,
    ) -> AsyncSandbox:
        """A new box."""
        options = {"policy": policy, "tier": tier, "min_isolation": min_isolation, "labels": labels}
        return cls(await threaded(Sandbox.create, image, template=template, **options))

    @property
    def id(self) -> str:
        """Its name."""
        return self.sync.id

    @property
    def isolation(self) -> Report:
        """The tier, and which limits are hard."""
        return self.sync.isolation

    async def exec(self, command: Any, **options: Any) -> Result:
        """Run a command. A cancelled call kills it."""
        if self._running is None:
            return await self._exec(command, options)
        async with self._running:
            return await self._exec(command, options)

    async def _exec(self, command: Any, options: dict[str, Any]) -> Result:
        process = await self.start(command, **options)
        try:
            return await threaded(process.wait)
        except asyncio.CancelledError:
            process.kill()
            raise

    async def start(self, command: Any, **options: Any) -> Process:
        """Start a command in the background."""
        return await threaded(self.sync.exec, command, **{**options, "background": True})

    async def python(self, code: str, **options: Any) -> PythonResult:
        """Run Python code in the box's interpreter."""
        if self._running is None:
            return await threaded(self.sync.python, code, **options)
        async with self._running:
            return await threaded(self.sync.python, code, **options)

    async def stream(self, process: Process) -> AsyncIterator[tuple[str, bytes]]:
        """Output of a background command as it comes."""
        items = iter(process)
        while (item := await threaded(next, items, None)) is not None:
            yield item

    async def read_file(self, path: str, max_bytes: int = LARGEST_READ, offset: int = 0) -> bytes:
        """Part of a file."""
        return await threaded(self.sync.read_file, path, max_bytes, offset)

    async def write_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file."""
        await threaded(self.sync.write_file, path, data, mode)

    async def list_dir(self, path: str = "/workspace") -> list[Entry]:
        """Entries of a directory."""
        return await threaded(self.sync.list_dir, path)

    async def changes(self) -> list[Change]:
        """Differences from the layers below."""
        return await threaded(self.sync.changes)

    async def snapshot(self, mode: Any = "stop") -> Snapshot[Sandbox]:
        """Seal what was written."""
        return await threaded(self.sync.snapshot, mode)

    async def fork(self, n: int = 1) -> list[AsyncSandbox]:
        """`n` boxes that continue from here."""
        return [AsyncSandbox(box, self._running) for box in await threaded(self.sync.fork, n)]

    async def pause(self, mode: Any = "freeze") -> None:
        """Freeze or hibernate."""
        await threaded(self.sync.pause, mode)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await threaded(self.sync.resume)

    async def close(self) -> None:
        """End and remove it."""
        await asyncio.shield(threaded(self.sync.close))

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
