"""The way out: rules, odd names, hidden addresses, and boxes that reach what they may and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ArgumentError
from hetero.sandbox import audit
from hetero.sandbox.errors import CapabilityUnavailable
from hetero.sandbox.grade import fresh_fork
from hetero.sandbox.network import Network, Rule
from hetero.sandbox.policy import ALLOW, Decision, Event, Policy, deny
from hetero.sandbox.proxy import connection, heads
from hetero.sandbox.proxy.connection import Client, serve
from hetero.sandbox.proxy.heads import BadRequest, parse
from hetero.sandbox.proxy.names import host_of, is_public, matches
from hetero.sandbox.sandbox import Sandbox

Make = Callable[..., Sandbox]
FETCH = """
import os, sys, urllib.request
del os.environ["no_proxy"], os.environ["NO_PROXY"]  # which keep a box's own localhost to itself
try:
    print(urllib.request.urlopen(sys.argv[1], data=sys.argv[2].encode() if len(sys.argv) > 2 else None,
                                 timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
TUNNEL = """
import os, socket, sys
line = socket.create_connection(("127.0.0.1", 3128), 20)
line.sendall(f"CONNECT {sys.argv[1]} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n".encode())
print(line.recv(4096).split(b"\\r\\n")[0].decode())
line.sendall(b"GET /tunnel HTTP/1.0\\r\\n\\r\\n")
data = b""
while part := line.recv(4096):
    data += part
print(data.decode())
"""


class Site(BaseHTTPRequestHandler):
    """Says what it was asked."""

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/big":
            text = b"x" * 400_000
        else:
            text = f"{self.command} {self.path} {self.headers['Host']} {body.decode()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """The port of a site on the host's loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def policy_of(*rules: str, private: bool = True, **options: Any) -> Policy:
    on_event = options.pop("on_event", None)
    return Policy(network=Network(allow=rules, private=private, **options), on_event=on_event)  # type: ignore[arg-type]


def fetch(box: Sandbox, url: str, *data: str) -> str:
    return box.exec(["python3", "-c", FETCH, url, *data], timeout=60).stdout.strip()


def events(journal: Path, box: Sandbox, kind: str) -> list[dict[str, Any]]:
    return [event for event in audit.read(journal) if event["sandbox"] == box.id and event["event"] == kind]


def test_allowed_hosts_are_reached_and_written_down(make_box: Make, site: int, journal: Path) -> None:
    box = make_box(policy=policy_of(f"localhost:{site}"))
    assert fetch(box, f"http://localhost:{site}/a?b=c") == f"GET /a?b=c localhost:{site}"
    assert fetch(box, f"http://localhost:{site}/p", "body") == f"POST /p localhost:{site} body"
    tunnel = box.exec(["python3", "-c", TUNNEL, f"localhost:{site}"], timeout=60).stdout
    assert tunnel.startswith("HTTP/1.1 200 Connection established")
    assert "GET /tunnel" in tunnel
    opened = events(journal, box, "net")
    assert [(e["method"], e["host"], e["port"], e["decision"]) for e in opened] == [
        (method, "localhost", site, "allow") for method in ("GET", "POST", "CONNECT")
    ]
    assert all("127.0.0.1" in event["addresses"] for event in opened)
    box.close()
    ended = events(journal, box, "net_end")
    assert len(ended) == 3
    assert all(event["sent"] >= 0 and event["received"] > 50 for event in ended)
    audit.verify(journal)


def test_all_else_is_refused(make_box: Make, site: int, journal: Path) -> None:
    box = make_box(policy=policy_of(f"localhost:{site}", "*.example.com"))
    for url, why in (
        (f"http://localhost:{site + 1}/", "no rule"),
        (f"http://127.0.0.1:{site}/", "no plain name"),
        (f"http://2130706433:{site}/", "no plain name"),
        (f"http://0x7f.1:{site}/", "no plain name"),
        (f"http://[::1]:{site}/", "neither"),
        ("http://example.com/", "no rule"),
        ("http://evil-example.com/", "no rule"),
        (f"http://localhost.:{site}/", "no plain name"),
    ):
        answer = fetch(box, url)
        assert answer.startswith(("403", "400")), (url, answer)
        assert why in answer, (url, answer)
    refused = events(journal, box, "net")
    assert len(refused) == 8
    assert {event["decision"] for event in refused} == {"deny"}
    assert all(event["reason"] for event in refused)
    for direct in ("127.0.0.1", "192.0.2.1"):
        code = f"import socket; socket.create_connection(({direct!r}, {site}), 2); print('connected')"
        assert "connected" not in box.exec(["python3", "-c", code]).stdout


def test_private_addresses_need_permission(make_box: Make, site: int) -> None:
    box = make_box(policy=policy_of(f"localhost:{site}", private=False))
    assert "not public: 127.0.0.1" in fetch(box, f"http://localhost:{site}/").replace("::1, ", "")


def test_the_byte_limit_cuts(make_box: Make, site: int, journal: Path) -> None:
    box = make_box(policy=policy_of(f"localhost:{site}", max_bytes=100_000))
    got = box.exec(["python3", "-c", FETCH, f"http://localhost:{site}/big"], timeout=60)
    assert len(got.stdout) < 400_000
    assert "used up" in fetch(box, f"http://localhost:{site}/again")
    box.close()
    (end,) = events(journal, box, "net_end")
    assert 100_000 < end["sent"] + end["received"] < 300_000


def test_the_callback_has_the_last_word(make_box: Make, site: int, journal: Path) -> None:
    seen: list[Event] = []

    def decide(event: Event) -> Decision:
        if event.kind == "net":
            seen.append(event)
            return deny("not today")
        return ALLOW

    box = make_box(policy=policy_of(f"localhost:{site}", on_event=decide))
    assert "the policy refused it" in fetch(box, f"http://localhost:{site}/")
    assert seen[0].detail["host"] == "localhost"
    (event,) = events(journal, box, "net")
    assert (event["decision"], event["reason"]) == ("deny", "not today")
    assert events(journal, box, "net_end") == []


def test_without_rules_there_is_no_proxy(box: Sandbox) -> None:
    assert "proxy" not in box.exec("env | tr A-Z a-z").stdout
    assert box.exec(["python3", "-c", TUNNEL, "localhost:80"]).exit != 0


def test_forks_have_their_own_way_and_grading_has_none(make_box: Make, site: int) -> None:
    box = make_box(policy=policy_of(f"localhost:{site}"))
    (kid,) = box.fork(1)
    assert fetch(kid, f"http://localhost:{site}/kid").startswith("GET /kid")
    box.pause("hibernate")
    box.resume()
    assert fetch(box, f"http://localhost:{site}/again").startswith("GET /again")
    with fresh_fork(box) as graded:
        assert graded.exec(["python3", "-c", TUNNEL, f"localhost:{site}"]).exit != 0
    kid.close()


def test_other_tiers_refuse_a_network() -> None:
    with pytest.raises(CapabilityUnavailable, match="proxy"):
        Sandbox.create(tier="landlock", min_isolation="landlock", policy=policy_of("example.com"))


def test_rules_are_parsed_and_bad_ones_refused() -> None:
    assert Rule.parse("*.example.com:8443,443") == Rule("*.example.com", (8443, 443))
    assert Rule.parse("data.example.org").ports == (80, 443)
    bad = (
        "127.0.0.1",
        "[::1]",
        "Example.com",
        "a b",
        "*",
        "*.",
        "x:0",
        "x:99999",
        "x:a",
        "ex*mple.com",
        "x.",
        "10",
    )
    for text in bad:
        with pytest.raises(ArgumentError):
            Rule.parse(text)
    with pytest.raises(ArgumentError, match="None"):
        Network()
    with pytest.raises(ArgumentError, match="max_bytes"):
        Network(allow=("x",), max_bytes=0)  # type: ignore[arg-type]


def test_names_match_by_whole_labels() -> None:
    rules = [("data.example.org", [443]), ("*.example.com", [80])]
    assert matches("data.example.org", 443, rules)
    assert matches("a.b.example.com", 80, rules)
    for host, port in (
        ("data.example.org", 80),
        ("xdata.example.org", 443),
        ("data.example.org.evil.com", 443),
        ("example.com", 80),
        ("evilexample.com", 80),
    ):
        assert not matches(host, port, rules), host


def test_odd_names_are_no_names() -> None:
    for text in (
        "1.2.3.4",
        "127.1",
        "0x7f000001",
        "a.0x7f",
        "017700000001",
        "[::1]",
        "::1",
        "example.com.",
        ".example.com",
        "exa mple.com",
        "example.com\0.evil.com",
        "example.com\r\nHost: evil",
        "user@example.com",
        "ex\u00e4mple.com",
        "example\u3002com",
        "-a.com",
        "a" * 64 + ".com",
        "",
    ):
        assert host_of(text) is None, text
    assert host_of("XN--Bcher-kva.Example") == "xn--bcher-kva.example"


def test_only_global_addresses_are_public() -> None:
    for text in ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(text), text
    for text in (
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a00:1::1",
    ):
        assert not is_public(text), text


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.sampled_from(["CONNECT ", "GET http://", ""]))
def test_any_head_is_refused_or_names_one_plain_host(data: bytes, start: str) -> None:
    head = start.encode() + data + b" HTTP/1.1\r\n\r\n"
    try:
        request = parse(head)
    except BadRequest:
        return
    assert host_of(request.host) == request.host
    assert request.forwarded.count(b"\r\n\r\n") == (request.method != "CONNECT")
    assert request.forwarded.lower().count(b"\r\nhost:") == (request.method != "CONNECT")


def test_heads_that_two_readers_could_read_in_two_ways_are_refused() -> None:
    for text in (
        "GET http://a.com/ HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4",
        "POST http://a.com/ HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST http://a.com/ HTTP/1.1\r\nContent-Length: +3",
        "GET http://a.com/ HTTP/1.1\r\nX: y\r\n folded",
        "GET http://a.com/ HTTP/1.1\r\nX : y",
        "GET http://a.com/ HTTP/1.1\r\nX: a\nHost: b",
        "GET http://a.com/\x00 HTTP/1.1",
        "GET http://a@b.com/ HTTP/1.1",
        "GET https://a.com/ HTTP/1.1",
        "GET / HTTP/1.1\r\nHost: a.com",
        "CONNECT a.com HTTP/1.1",
        "CONNECT a.com:0 HTTP/1.1",
        "CONNECT a.com:443 HTTP/2",
        "get http://a.com/ HTTP/1.1",
    ):
        with pytest.raises(BadRequest):
            parse(text.encode("latin-1") + b"\r\n\r\n")
    request = parse(
        b"GET http://A.com:8080/x HTTP/1.1\r\nHost: evil.com\r\nProxy-Authorization: s\r\nA: b\r\n\r\n"
    )
    assert request.forwarded == b"GET /x HTTP/1.1\r\nHost: a.com:8080\r\nA: b\r\nConnection: close\r\n\r\n"


def test_a_name_is_looked_up_once_and_its_addresses_are_the_only_ones(site: int) -> None:
    """A name that leads to a public address first and inside at the second look: there is no second look."""

    async def run(answers: list[list[str]]) -> tuple[bytes, list[dict[str, Any]], int]:
        told: list[dict[str, Any]] = []
        looked = 0

        async def lookup(host: str, port: int) -> list[str]:
            nonlocal looked
            looked += 1
            return answers[min(looked, len(answers)) - 1]

        async def ask(event: dict[str, Any]) -> str:
            told.append(json.loads(json.dumps(event)))
            return "deny" if event.get("addresses") == ["8.8.8.8"] else "allow"

        client = Client([("a.com", [site])], 10_000, 4, private=False)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)
        ours.sendall(f"CONNECT a.com:{site} HTTP/1.1\r\n\r\n".encode())
        await serve(reader, writer, client, ask, lookup)
        data = ours.recv(4096)
        ours.close()
        return data, told, looked

    for answers, why in (
        ([["127.0.0.1"]], b"not public: 127.0.0.1"),
        ([["8.8.8.8", "127.0.0.1"]], b"not public: 127.0.0.1"),
        ([["8.8.8.8"], ["127.0.0.1"]], b"the policy refused"),
        ([[]], b"not public: none"),
    ):
        data, told, looked = asyncio.run(run(answers))
        assert data.startswith(b"HTTP/1.1 403")
        assert why in data
        assert looked == 1
        assert len(told) == 1


@pytest.mark.parametrize(
    ("host", "address", "wall", "missing"),
    [
        ("a.com", "::ffff:127.0.0.1", (connection, "is_public"), lambda _: True),
        ("127.0.0.1", "127.0.0.1", (heads, "host_of"), lambda text: text),
        ("nota.com", "127.0.0.1", (connection, "matches"), lambda host, _, rules: host.endswith(rules[0][0])),
        ("a.com", "127.0.0.1", (connection, "_asked"), None),
    ],
    ids=["hidden address", "address as a name", "half a label", "refused by the owner"],
)
def test_15_every_wall_of_the_proxy_is_needed(
    site: int, monkeypatch: pytest.MonkeyPatch, host: str, address: str, wall: Any, missing: Any
) -> None:
    """A trick that the proxy refuses reaches the host's own site once the one wall against it is missing."""
    private, refused = missing is None or wall[1] != "is_public", missing is None

    async def run(verdict: str) -> bytes:
        async def lookup(name: str, port: int) -> list[str]:
            return [address]

        async def ask(event: dict[str, Any]) -> str:
            return verdict

        rules = [("a.com", [site])] if wall[1] != "host_of" else [(host, [site])]
        client = Client(rules, 10_000, 4, private=private)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)
        ours.sendall(f"CONNECT {host}:{site} HTTP/1.1\r\n\r\nGET /x HTTP/1.0\r\n\r\n".encode())
        ours.shutdown(socket.SHUT_WR)
        await serve(reader, writer, client, ask, lookup)
        with ours:
            return await asyncio.to_thread(lambda: b"".join(iter(lambda: ours.recv(4096), b"")))

    assert b"GET /x" not in asyncio.run(run("deny" if refused else "allow"))
    if missing is not None:
        monkeypatch.setattr(*wall, missing)
    assert b"GET /x" in asyncio.run(run("allow"))
