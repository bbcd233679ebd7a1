"""Client of a service that speaks E2B's HTTP API (E2B itself, AgentENV): boxes, and what runs in each.

Boxes are made and ended at the service's address. Each has an agent (envd, port 49983) for its files (plain
HTTP) and processes (the Connect protocol with JSON: frames of a flag byte, four bytes of length, a message).

Settings are E2B's own: E2B_API_KEY; E2B_API_URL, else https://api.$E2B_DOMAIN; E2B_SANDBOX_URL when all boxes
share an address and are told apart by headers, else https://49983-BOX.DOMAIN.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from hetero.sandbox.errors import IsolationUnavailable, SandboxDead, SandboxInfraError

PORT = "49983"
USER = "root"
_LARGEST = 64 << 20


class Refused(SandboxInfraError):
    """The service answered with an error. `status`: HTTP's; `code`: of the Connect protocol, or ""."""

    def __init__(self, message: str, status: int, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Service:
    """Where the service is, and the key to it."""

    url: str
    key: str
    boxes_url: str
    domain: str

    @classmethod
    def from_environment(cls) -> Service:
        """Raises IsolationUnavailable without a key."""
        key, domain = os.environ.get("E2B_API_KEY", ""), os.environ.get("E2B_DOMAIN", "e2b.app")
        if not key:
            raise IsolationUnavailable(
                "The tier microvm needs a service with E2B's API, and no key for one is set.",
                "Set E2B_API_KEY, and E2B_API_URL and E2B_SANDBOX_URL for a service of your own (AgentENV).",
            )
        url = os.environ.get("E2B_API_URL") or f"https://api.{domain}"
        return cls(url.rstrip("/"), key, os.environ.get("E2B_SANDBOX_URL", "").rstrip("/"), domain)

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 120
    ) -> Any:
        """The answer's JSON, None if it has none. Raises Refused, SandboxInfraError."""
        headers = {"X-API-Key": self.key, "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with _answer(self.url, method, path, headers, data, timeout) as response:
            found = response.read(_LARGEST)
        return json.loads(found) if found else None


@dataclass(frozen=True)
class Agent:
    """The agent of one box."""

    url: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, service: Service, box: Mapping[str, Any]) -> Agent:
        """The agent of a box as the service described it."""
        name, domain = str(box["sandboxID"]), box.get("domain") or service.domain
        headers = {"Authorization": "Basic " + base64.b64encode(f"{USER}:".encode()).decode()}
        for header, field in (
            ("X-Access-Token", "envdAccessToken"),
            ("E2B-Traffic-Access-Token", "trafficAccessToken"),
        ):
            if box.get(field):
                headers[header] = str(box[field])
        if service.boxes_url:
            return cls(service.boxes_url, {**headers, "E2b-Sandbox-Id": name, "E2b-Sandbox-Port": PORT})
        return cls(f"https://{PORT}-{name}.{domain}", headers)

    def read(self, path: str, most: int) -> bytes:
        """At most `most` bytes of a file."""
        with _answer(self.url, "GET", _files(path), self.headers, None, 120) as response:
            return response.read(most)

    def write(self, path: str, data: bytes) -> None:
        """Write a file; missing directories are made."""
        mark = base64.b16encode(os.urandom(16)).decode()
        head = (
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{mark}--\r\n".encode()
        headers = {**self.headers, "Content-Type": f"multipart/form-data; boundary={mark}"}
        with _answer(self.url, "POST", _files(path), headers, body, 120):
            pass

    def ask(self, method: str, body: Mapping[str, Any]) -> Any:
        """One call, such as "filesystem.Filesystem/Stat", and its answer."""
        headers = {**self.headers, "Content-Type": "application/json", "Connect-Protocol-Version": "1"}
        data = json.dumps(body).encode()
        with _answer(self.url, "POST", f"/{method}", headers, data, 120) as response:
            return json.loads(response.read(_LARGEST) or b"{}")

    def run(self, argv: list[str]) -> None:
        """Run a program to its end. Raises SandboxInfraError when it fails."""
        process = {"cmd": argv[0], "args": argv[1:]}
        for message in self.stream("process.Process/Start", {"process": process, "stdin": False}):
            end = message.get("event", {}).get("end")
            if end is not None and int(end.get("exitCode", 0)) != 0:
                raise SandboxInfraError(f"{' '.join(argv)} failed in the box: {end}.")

    def stream(self, method: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The messages of a streamed answer, as they come. Raises Refused when it ends with an error."""
        message = json.dumps(body).encode()
        headers = {
            **self.headers,
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
        }
        data = struct.pack(">BI", 0, len(message)) + message
        with _answer(self.url, "POST", f"/{method}", headers, data, None) as response:
            while len(head := response.read(5)) == 5:
                flags, length = struct.unpack(">BI", head)
                if length > _LARGEST:
                    raise SandboxInfraError(f"The box's agent sent a message of {length} bytes.")
                found = json.loads(response.read(length) or b"{}")
                if not flags & 2:
                    yield found
                    continue
                if found.get("error"):
                    error = found["error"]
                    raise Refused(str(error.get("message", error)), 200, str(error.get("code", "")))
                return
        raise SandboxInfraError("The box's agent broke off its answer.")


def _files(path: str) -> str:
    return "/files?" + urlencode({"path": path, "username": USER}, quote_via=quote)


@contextlib.contextmanager
def _answer(
    url: str, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: float | None
) -> Iterator[http.client.HTTPResponse]:
    """The response, if it says that all is well. Raises Refused for another, SandboxInfraError for none."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request(method, parts.path + path, body, dict(headers))
        response = connection.getresponse()
        if response.status >= 300:
            raise _refusal(f"{method} {path.partition('?')[0]}", response)
        yield response
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SandboxInfraError(f"The service at {url} cannot be used: {error}.") from error
    finally:
        connection.close()


def _refusal(what: str, response: http.client.HTTPResponse) -> Refused:
    text = response.read(4096).decode("utf-8", "replace")
    try:
        said = json.loads(text)
        text, code = str(said.get("message", text)), str(said.get("code", ""))
    except (ValueError, AttributeError):
        code = ""
    return Refused(f"{what} was answered with {response.status}: {text[:300]}", response.status, code)


def dead(error: Refused, box: str) -> SandboxDead:
    """The error for a box that the service does not know any more."""
    return SandboxDead(f"Sandbox {box} is gone from the service: {error}.")
