"""One connection from a box: its head is read, the owner is asked, then bytes are carried and counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hetero.sandbox.proxy.heads import LONGEST, BadRequest, Request, parse
from hetero.sandbox.proxy.names import is_public, matches

HEAD_S, CONNECT_S, IDLE_S = 15.0, 15.0, 300.0
_CHUNK = 1 << 16
Ask = Callable[[dict[str, Any]], Awaitable[str]]
Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass
class Client:
    """What one box may do, and what it has done."""

    rules: list[tuple[str, list[int]]]
    max_bytes: int
    max_connections: int
    private: bool
    used: int = 0
    open: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Denied(Exception):
    """A connection that is refused. `args[0]`: why."""


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    client: Client,
    ask: Ask,
    lookup: Resolve = resolve,
) -> None:
    """Serve a connection to its end.

    `ask` tells the owner of it: once when it is decided (the answer is "allow" or "deny"), and once when it
    has ended.
    """
    told: dict[str, Any] = {"decision": "deny", "method": "", "host": "", "port": 0}
    counts = {"sent": 0, "received": 0}
    client.open += 1
    try:
        request, addresses = await _admit(reader, client, lookup, told)
        if await ask({"event": "net", **told}) != "allow":
            told["decision"] = "refused"
            raise Denied("the policy refused it")
        await _carry(reader, writer, request, addresses, client, counts)
    except Denied as error:
        if told["decision"] == "deny":
            await ask({"event": "net", **told, "reason": str(error)})
        told["ended"] = str(error)
        await _refuse(writer, 403, str(error))
    except BadRequest as error:
        await ask({"event": "net", **told, "reason": str(error)})
        await _refuse(writer, 400, str(error))
    except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError) as error:
        told["ended"] = f"{type(error).__name__}: {error}"
        await _refuse(writer, 502, "the host cannot be reached")
    finally:
        client.open -= 1
        writer.close()
        if told["decision"] == "allow":
            await ask({"event": "net_end", **told, **counts})


async def _admit(
    reader: asyncio.StreamReader, client: Client, lookup: Resolve, told: dict[str, Any]
) -> tuple[Request, list[str]]:
    """The request and the addresses that it may go to. Raises Denied, BadRequest, OSError."""
    if client.open > client.max_connections:
        raise Denied(f"more than {client.max_connections} connections at once")
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
        raise BadRequest(f"no whole head within {LONGEST} bytes and {HEAD_S:.0f} s") from None
    request = parse(head)
    told.update(method=request.method, host=request.host, port=request.port)
    if client.used >= client.max_bytes:
        raise Denied(f"the box has used up its {client.max_bytes} bytes")
    if not matches(request.host, request.port, client.rules):
        raise Denied("no rule allows this host and port")
    try:
        addresses = await asyncio.wait_for(lookup(request.host, request.port), CONNECT_S)
    except (OSError, asyncio.TimeoutError):
        raise Denied("the name has no address") from None
    hidden = [address for address in addresses if not is_public(address)]
    if not addresses or (hidden and not client.private):
        raise Denied(f"the name leads to an address that is not public: {', '.join(hidden) or 'none'}")
    told.update(decision="allow", addresses=addresses)
    return request, addresses


async def _carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: Request,
    addresses: list[str],
    client: Client,
    counts: dict[str, int],
) -> None:
    """Connect to an address that was judged, and to no other; move bytes until one side ends."""
    there_in, there_out = await _connect(addresses, request.port)
    try:
        if request.method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
        else:
            there_out.write(request.forwarded)
        left = request.body if request.method != "CONNECT" else -1
        there = asyncio.create_task(_pump(reader, there_out, client, counts, "sent", left))
        back = asyncio.create_task(_pump(there_in, writer, client, counts, "received", -1))
        try:
            waits = {back} if left >= 0 else {there, back}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not back.done():  # the box has said all; what comes back may take its time
                await back
            back.result()
            if there.done():
                there.result()
        finally:
            for task in (there, back):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, Denied, asyncio.TimeoutError):
                    await task
    finally:
        there_out.close()


async def _connect(addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    failed: BaseException = OSError("no address")
    for address in addresses:
        try:
            return await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            failed = error
    raise OSError(str(failed)) from failed


async def _pump(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    client: Client,
    counts: dict[str, int],
    name: str,
    left: int,
) -> None:
    """Move bytes, at most `left` unless that is negative. Raises Denied at the limit."""
    while left:
        data = await asyncio.wait_for(source.read(min(_CHUNK, left) if left > 0 else _CHUNK), IDLE_S)
        if not data:
            break
        left -= len(data) if left > 0 else 0
        counts[name] += len(data)
        client.used += len(data)
        if client.used > client.max_bytes:
            raise Denied(f"the box has used up its {client.max_bytes} bytes")
        target.write(data)
        await target.drain()
    if left < 0 and target.can_write_eof():
        target.write_eof()


async def _refuse(writer: asyncio.StreamWriter, status: int, why: str) -> None:
    text = f"sandbox proxy: {why}\n".encode()
    words = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}[status]
    head = f"HTTP/1.1 {status} {words}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    with contextlib.suppress(OSError):
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + text)
        await writer.drain()
