"""Heads of HTTP requests to a proxy, read strictly: what two programs could read in two ways is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero.sandbox.proxy.names import host_of

LONGEST = 32_768
_TUNNEL = re.compile(r"CONNECT ([^\s/?#]+):([0-9]{1,5}) HTTP/1\.[01]")
_PLAIN = re.compile(r"([A-Z]{3,10}) http://([^\s/?#:]+)(?::([0-9]{1,5}))?(/[!-~]*)? HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_DROPPED = {"host", "connection", "keep-alive", "te", "trailer", "upgrade"}


class BadRequest(Exception):
    """A request that is not understood in one way only. `args[0]`: why."""


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        method: "CONNECT" or a plain request's.
        host, port: where it goes; the name in lower case.
        forwarded: the head to send on; b"" for a tunnel.
        body: bytes of body that follow.
    """

    method: str
    host: str
    port: int
    forwarded: bytes
    body: int


def parse(head: bytes) -> Request:
    """The request of a head, which ends with an empty line. Raises BadRequest."""
    line, *rows = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if any(ord(char) < 0x20 or ord(char) > 0x7E for char in line):
        raise BadRequest("the request line has bytes that are not printable ASCII")
    fields = [_field(row) for row in rows]
    tunnel = _TUNNEL.fullmatch(line)
    if tunnel:
        host, port = _target(tunnel[1], tunnel[2])
        return Request("CONNECT", host, port, b"", 0)
    plain = _PLAIN.fullmatch(line)
    if plain is None:
        raise BadRequest(f"neither CONNECT host:port nor METHOD http://host/path: {line[:80]}")
    host, port = _target(plain[2], plain[3] or "80")
    shown = host if port == 80 else f"{host}:{port}"
    kept = [f"{name}: {value}" for name, value in fields if not _is_dropped(name)]
    text = [f"{plain[1]} {plain[4] or '/'} HTTP/1.1", f"Host: {shown}", *kept, "Connection: close", "", ""]
    return Request(plain[1], host, port, "\r\n".join(text).encode("latin-1"), _length(fields))


def _field(row: str) -> tuple[str, str]:
    found = _FIELD.fullmatch(row)
    if found is None:
        raise BadRequest("a header line is not name: value")
    return found[1], found[2].strip()


def _is_dropped(name: str) -> bool:
    return name.lower() in _DROPPED or name.lower().startswith("proxy-")


def _target(host: str, port: str) -> tuple[str, int]:
    name, number = host_of(host), int(port)
    if name is None:
        raise BadRequest(f"the host is no plain name (addresses are refused): {host[:80]}")
    if not 0 < number < 65_536:
        raise BadRequest(f"there is no port {number}")
    return name, number


def _length(fields: list[tuple[str, str]]) -> int:
    """Bytes of body: one number, no chunks, so that nothing after it can be taken for a second request."""
    named = [value for name, value in fields if name.lower() == "content-length"]
    if any(name.lower() == "transfer-encoding" for name, _ in fields):
        raise BadRequest("a body in chunks is not passed on; send Content-Length")
    if len(named) > 1 or any(not (value.isascii() and value.isdigit()) or len(value) > 15 for value in named):
        raise BadRequest("Content-Length is not one number")
    return int(named[0]) if named else 0
