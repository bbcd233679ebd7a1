"""Makes a listening socket in a box's network namespace and hands it out: whoever has it serves the box."""

from __future__ import annotations

import _socket
import struct

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BACKLOG = 64


def listen(request: dict[str, Any], channel: int, box: tuple[int, int]) -> None:
    """Answer with a socket that listens on 127.0.0.1 and the request's port inside. Raises OSError."""
    k.setns(box[1], k.CLONE_NEWUSER | k.CLONE_NEWNET)
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", request["port"]))
    listener.listen(_BACKLOG)
    handles = struct.pack("i", listener.fileno())
    sender = _socket.socket(fileno=channel)
    sender.sendmsg([wire.pack({"ok": True})], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, handles)])
    sender.detach()
