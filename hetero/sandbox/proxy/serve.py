"""The process of the proxy: takes boxes' listening sockets from its owner, asks it about every connection."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401
import encodings.idna  # noqa: F401
import itertools
import json
import os
import socket
import sys
from typing import Any

from hetero.sandbox.proxy.connection import Client, serve
from hetero.sandbox.proxy.heads import LONGEST

# The two unused imports are what looking up names loads late; after the change of user the interpreter's own
# files may be out of reach.
_LARGEST = 1 << 16


class Proxy:
    """State: the boxes by id, and questions that the owner has not answered yet."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._clients: dict[str, Client] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the owner is gone."""
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._hear)
        await self._ended.wait()

    def _hear(self) -> None:
        data, handles, _, _ = socket.recv_fds(self._control, _LARGEST, 1)
        if not data:
            self._ended.set()
            return
        message = json.loads(data)
        if message["op"] == "answer":
            waiting = self._asked.pop(message["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message["verdict"])
        elif message["op"] == "add":
            self._add(message, socket.socket(fileno=handles[0]))
        else:
            self._remove(message["box"])

    def _add(self, message: dict[str, Any], listener: socket.socket) -> None:
        box = message["box"]
        client = self._clients.setdefault(box, Client(**message["client"]))

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            client.tasks.add(task)
            try:
                await serve(reader, writer, client, lambda told: self._ask(box, told))
            finally:
                client.tasks.discard(task)

        async def listen() -> None:
            listener.setblocking(False)
            old = self._servers.pop(box, None)
            if old is not None:
                old.close()
            self._servers[box] = await asyncio.start_server(accepted, sock=listener, limit=LONGEST)

        self._listening = asyncio.get_running_loop().create_task(listen())

    def _remove(self, box: str) -> None:
        server, client = self._servers.pop(box, None), self._clients.pop(box, None)
        if server is not None:
            server.close()
        tasks = list(client.tasks) if client is not None else []
        for task in tasks:
            task.cancel()

        async def done() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._send(json.dumps({"id": -1, "box": box, "event": "removed"}).encode())

        self._removing = asyncio.get_running_loop().create_task(done())

    async def _ask(self, box: str, told: dict[str, Any]) -> str:
        """The owner's answer; "deny" when it is gone."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(json.dumps({"id": number, "box": box, **told}).encode())
        except OSError:
            return "deny"
        return await answer

    async def _send(self, data: bytes) -> None:
        """Send whole; the owner may be slow."""
        while True:
            try:
                self._control.send(data)
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)


def main() -> None:
    """Entry point: argv holds the control socket, and the user and group to become."""
    uid, gid = int(sys.argv[2]), int(sys.argv[3])
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    control = socket.socket(fileno=int(sys.argv[1]))

    async def live() -> None:
        await Proxy(control).run()

    asyncio.run(live())
