"""Host names and addresses: parsed once, compared as what they are, and refused when they are odd."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def host_of(text: str) -> str | None:
    """The name in lower case; None for an address in any notation and for what is no plain ASCII name
    (control bytes, "@", a trailing dot, other scripts)."""
    name = text.lower() if text.isascii() else ""
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return None if _NUMBER.fullmatch(labels[-1]) else name


def matches(host: str, port: int, rules: Iterable[tuple[str, Sequence[int]]]) -> bool:
    """Whether a parsed name and a port are in a rule: (name or *.suffix, ports)."""
    for pattern, ports in rules:
        if port not in ports:
            continue
        if host == pattern or (
            pattern.startswith("*.") and host.endswith(pattern[1:]) and host != pattern[2:]
        ):
            return True
    return False


def is_public(text: str) -> bool:
    """Whether an address belongs to the whole internet, whatever it is wrapped in."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _TRANSLATED:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(each is not None and not _is_global(each) for each in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return _is_global(address)


def _is_global(address: Address) -> bool:
    return address.is_global and not address.is_multicast and not address.is_reserved
