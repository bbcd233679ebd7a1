"""What a box may reach: nothing, or named hosts through a proxy where every connection is written down."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import ArgumentError
from hetero.sandbox.proxy.names import host_of

PORT = 3128
"""Where the proxy answers inside a box, on 127.0.0.1."""


@dataclass(frozen=True)
class Rule:
    """Hosts and ports that may be reached.

    Attributes:
        host: an exact name, or "*.suffix" for all names below a suffix (not the suffix itself).
        ports: the ports.
    """

    host: str
    ports: tuple[int, ...] = (80, 443)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ports", tuple(self.ports))
        name = self.host.removeprefix("*.")
        if host_of(name) != name or not self.ports or not all(0 < port < 65_536 for port in self.ports):
            raise ArgumentError(
                f"The network rule {self.host!r} with ports {self.ports} names no host. Write a lower-case "
                "ASCII name or *.suffix, no address, and ports from 1 to 65535."
            )

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Of "host" or "host:port,port". Raises ArgumentError."""
        host, colon, ports = text.partition(":")
        if not colon:
            return cls(host)
        if not all(part.isascii() and part.isdigit() for part in ports.split(",")):
            raise ArgumentError(f'The network rule {text!r} has no ports after ":"; write "host:443,8443".')
        return cls(host, tuple(int(part) for part in ports.split(",")))


@dataclass(frozen=True)
class Network:
    """Hosts that a box reaches through the proxy (HTTP_PROXY and HTTPS_PROXY are set in it). All else is
    refused, and there is no other way out.

    What travels inside a CONNECT tunnel is not looked at: a host that serves other people's content (a
    mirror, a code host) is a way to all of it.

    Attributes:
        allow: Rules, or texts like "data.example.org" and "*.example.net:443".
        max_bytes: sum of both directions over the box's life; then connections are cut.
        max_connections: at once.
        private: let names lead to loopback, private and link-local addresses. For tests and services of one's
            own; otherwise a name with one such address is refused.
    """

    allow: tuple[Rule, ...] = ()
    max_bytes: int = 256 << 20
    max_connections: int = 32
    private: bool = False

    def __post_init__(self) -> None:
        rules = (rule if isinstance(rule, Rule) else Rule.parse(rule) for rule in self.allow)
        object.__setattr__(self, "allow", tuple(rules))
        if not self.allow:
            raise ArgumentError("A Network without rules reaches nothing; leave Policy.network None then.")
        for name in ("max_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Network.{name} is {getattr(self, name)}; it must be at least 1.")


def environment() -> dict[str, str]:
    """What tells programs in a box of the proxy."""
    url = f"http://127.0.0.1:{PORT}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    return {**dict.fromkeys(names, url), "NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}
