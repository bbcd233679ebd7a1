"""A small service with E2B's API on the loopback: what its documentation says, over plain directories.

Boxes are directories, commands run on the host in them: for tests of the client only.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "e2b_test"


class Machine:
    """One box: a directory, a token, running commands."""

    def __init__(self, root: Path, name: str, token: str) -> None:
        self.root, self.name, self.token, self.state = root, name, token, "running"
        self.commands: dict[int, subprocess.Popen[bytes]] = {}
        self.timeouts: list[int] = []

    def inside(self, path: str) -> Path:
        """Where a path of the box lies on the host."""
        return self.root / path.lstrip("/")


class Server(ThreadingHTTPServer):
    """Its state; `url` serves both the API and all agents."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.numbers = root, itertools.count(1)  # requests come from several threads
        self.machines: dict[str, Machine] = {}
        self.templates: dict[str, Path] = {"base": root / "base"}
        self.templates["base"].mkdir(parents=True)
        self.created: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def make(self, template: Path) -> Machine:
        """A new box with a template's files."""
        number = next(self.numbers)
        name = f"box{number}"
        shutil.copytree(template, self.root / name, symlinks=True)
        self.machines[name] = Machine(self.root / name, name, f"token{number}")
        return self.machines[name]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: object) -> None:
        pass

    def reply(self, status: int, body: Any = None) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        if self.headers.get("E2b-Sandbox-Id"):
            self.agent(parts.path, parse_qs(parts.query), body)
        elif self.headers.get("X-API-Key") != KEY:
            self.reply(401, {"code": 401, "message": "the key is wrong"})
        else:
            self.api(parts.path.strip("/").split("/"), json.loads(body) if body else {})

    do_GET = do_POST = do_DELETE = handle_any

    def api(self, path: list[str], body: dict[str, Any]) -> None:
        server = self.server
        if path == ["v2", "sandboxes"]:
            self.reply(200, [])
        elif path == ["sandboxes"]:
            server.created.append(body)
            if body["templateID"] not in server.templates:
                self.reply(400, {"code": 400, "message": f"no template {body['templateID']}"})
                return
            self.reply(201, self.described(server.make(server.templates[body["templateID"]])))
        elif path[0] == "templates" and self.command == "DELETE":
            self.reply(204 if server.templates.pop(path[1], None) else 404)
        elif path[1] not in server.machines:
            self.reply(404, {"code": 404, "message": "no such sandbox"})
        else:
            self.act(server.machines[path[1]], path[2:], body)

    def act(self, machine: Machine, verb: list[str], body: dict[str, Any]) -> None:
        if self.command == "DELETE":
            for command in machine.commands.values():
                command.kill()
            shutil.rmtree(machine.root)
            del self.server.machines[machine.name]
            self.reply(204)
        elif verb == ["pause"]:
            machine.state = "paused"
            self.reply(204)
        elif verb == ["timeout"]:
            machine.timeouts.append(body["timeout"])
            self.reply(204)
        elif verb == ["connect"]:
            machine.state, machine.token = "running", machine.token + "x"
            self.reply(201, self.described(machine))
        elif verb == ["snapshots"]:
            name = f"snap{len(self.server.templates)}"
            shutil.copytree(machine.root, self.server.root / name, symlinks=True)
            self.server.templates[name] = self.server.root / name
            self.reply(201, {"snapshotID": name, "names": []})
        else:
            self.reply(404, {"code": 404, "message": "no such call"})

    def described(self, machine: Machine) -> dict[str, Any]:
        return {
            "sandboxID": machine.name,
            "templateID": "base",
            "clientID": "c",
            "envdVersion": "0.2.0",
            "envdAccessToken": machine.token,
        }

    def agent(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        machine = self.server.machines.get(self.headers["E2b-Sandbox-Id"])
        if machine is None or machine.state != "running" or self.headers["E2b-Sandbox-Port"] != "49983":
            self.reply(502, {"message": "no such sandbox", "code": 502})
        elif self.headers.get("X-Access-Token") != machine.token:
            self.reply(401, {"code": "unauthenticated", "message": "the token is wrong"})
        elif path == "/files":
            self.files(machine.inside(query["path"][0]), body)
        elif path == "/process.Process/Start":
            self.start(machine, json.loads(body[5:]))
        else:
            self.call(machine, path.rpartition("/")[2], json.loads(body))

    def files(self, path: Path, body: bytes) -> None:
        if self.command == "GET":
            if path.is_file():
                self.reply(200, path.read_bytes())
            else:
                self.reply(404, {"code": 404, "message": "no such file"})
            return
        mark = b"--" + self.headers["Content-Type"].partition("boundary=")[2].encode()
        part = body.split(mark)[1].partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(part)
        self.reply(200, [{"name": path.name, "type": "file", "path": str(path)}])

    def call(self, machine: Machine, method: str, body: dict[str, Any]) -> None:
        if method == "MakeDir":
            machine.inside(body["path"]).mkdir(parents=True, exist_ok=True)
            self.reply(200, {})
        elif method in ("Stat", "ListDir"):
            path = machine.inside(body["path"])
            if not path.exists():
                self.reply(404, {"code": "not_found", "message": "no such file"})
            elif method == "Stat":
                self.reply(200, {"entry": entry(path)})
            else:
                self.reply(200, {"entries": [entry(each) for each in sorted(path.iterdir())]})
        else:
            command = machine.commands.get(body["process"]["pid"])
            if command is None:
                self.reply(404, {"code": "not_found", "message": "no such process"})
                return
            if method == "SendSignal":
                command.send_signal(signal.Signals[body["signal"].removeprefix("SIGNAL_")])
            elif method == "SendInput" and command.stdin is not None:
                command.stdin.write(base64.b64decode(body["input"]["stdin"]))
                command.stdin.flush()
            elif method == "CloseStdin" and command.stdin is not None:
                command.stdin.close()
            self.reply(200, {})

    def start(self, machine: Machine, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        process = body["process"]
        argv = [process["cmd"], *process.get("args", [])]
        if argv[0] == "chmod":
            argv[-1] = str(machine.inside(argv[-1]))
        try:
            command = subprocess.Popen(
                argv,
                cwd=machine.inside(process.get("cwd", "/")),
                env={**os.environ, **process.get("envs", {}), "HOME": str(machine.root)},
                stdin=subprocess.PIPE if body.get("stdin") else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError:
            self.frame({"error": {"code": "invalid_argument", "message": f"{argv[0]}: not found"}}, 2)
            self.wfile.write(b"0\r\n\r\n")
            return
        machine.commands[command.pid] = command
        self.frame({"event": {"start": {"pid": command.pid}}})
        lock = threading.Lock()

        def carry(name: str) -> None:
            stream = getattr(command, name)
            while data := os.read(stream.fileno(), 4096):
                with lock:
                    self.frame({"event": {"data": {name: base64.b64encode(data).decode()}}})

        carriers = [threading.Thread(target=carry, args=(name,)) for name in ("stdout", "stderr")]
        for carrier in carriers:
            carrier.start()
        for carrier in carriers:
            carrier.join()
        code = command.wait()
        for stream in (command.stdout, command.stderr, command.stdin):
            if stream is not None:
                stream.close()
        status = f"exit status {code}" if code >= 0 else "signal: killed"
        end = {"exited": code >= 0, "status": status, **({"exitCode": code} if code else {})}
        self.frame({"event": {"end": end}})
        self.frame({}, 2)
        self.wfile.write(b"0\r\n\r\n")

    def frame(self, message: dict[str, Any], flags: int = 0) -> None:
        data = json.dumps(message).encode()
        data = struct.pack(">BI", flags, len(data)) + data
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def entry(path: Path) -> dict[str, Any]:
    """What the agent says of one name; sizes are strings, as 64-bit numbers are in protobuf's JSON."""
    status = path.lstat()
    kinds = {
        stat.S_IFDIR: "FILE_TYPE_DIRECTORY",
        stat.S_IFREG: "FILE_TYPE_FILE",
        stat.S_IFLNK: "FILE_TYPE_SYMLINK",
    }
    kind = kinds[stat.S_IFMT(status.st_mode)]
    return {"name": path.name, "type": kind, "size": str(status.st_size), "mode": status.st_mode & 0o7777}
