"""The owner's end of the launcher: starts it, sends requests, notices when it is gone."""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hetero.sandbox.companion import Companion
from hetero.sandbox.errors import SandboxDead, SandboxInfraError
from hetero.sandbox.janitor import Janitor
from hetero.sandbox.launcher import wire
from hetero.sandbox.store import Run, close_run, open_run, outer_ids

_BOOT = """
import sys
for name, path in (("hetero", {house!r}), ("hetero.sandbox", {sandbox!r})):
    module = type(sys)(name); module.__path__ = [path]; sys.modules[name] = module
from {module} import main
main()
"""


def boot_code(module: str) -> str:
    """A program that runs `main` of a module below here without importing `hetero` itself."""
    here = Path(__file__).resolve().parent
    return _BOOT.format(house=str(here.parent), sandbox=str(here), module=module)


REPLY_S = 120.0
CGROUPS = "/sys/fs/cgroup"


class Launcher:
    """One launcher process and the run directory that it looks after.

    Starts with `fork` and `exec` of a small interpreter, so the size and the threads of the owner do not
    matter. Any thread may send requests.
    """

    def __init__(self, weaken: tuple[str, ...] = (), cgroups: str = CGROUPS) -> None:
        self.run: Run = open_run()
        self.pid = os.getpid()
        self.janitor = Janitor(self.run.path / "gone")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        settings = {
            "run": str(self.run.path),
            "outer": outer_ids(),
            "groups": f"hetero-{self.run.path.name}",
            "cgroups": cgroups,
            "weaken": list(weaken),
        }
        boot = boot_code("hetero.sandbox.launcher.start")
        with theirs, open(self.run.path / "launcher.log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    boot,
                    str(theirs.fileno()),
                    str(self.pid),
                    marshal.dumps(settings).hex(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,  # who ends the owner's process group leaves it time to tidy up
                env={"LANG": "C.UTF-8"},
                pass_fds=(theirs.fileno(), self.run.lock),
            )

    def ask(
        self, operation: str, box: str, details: Any = None, frame: Any = None, files: tuple[int, ...] = ()
    ) -> Any:
        """Send a request, wait for its one reply, return it. Raises SandboxInfraError, SandboxDead."""
        channel = self.open(operation, box, details, frame, files)
        with channel:
            channel.settimeout(REPLY_S)
            return self.reply(channel, operation)

    def open(
        self, operation: str, box: str, details: Any = None, frame: Any = None, files: tuple[int, ...] = ()
    ) -> socket.socket:
        """Send a request; the channel on which its worker answers."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                message = marshal.dumps((operation, box, details))
                socket.send_fds(self._control, [message], [theirs.fileno(), *files])
            except OSError as error:
                ours.close()
                raise self.gone() from error
        if frame is not None:
            with contextlib.suppress(OSError):  # the worker has refused already: its reply says why
                ours.sendall(wire.pack(frame))
        return ours

    def reply(self, channel: socket.socket, operation: str) -> Any:
        """The next frame on a channel."""
        frame = receive(channel)
        if frame is None:
            if self.process.poll() is not None:
                raise self.gone()
            raise SandboxInfraError(f"The worker of {operation} ended without an answer.{self.log()}")
        return frame

    def gone(self) -> SandboxDead:
        """The error that says that the launcher has ended."""
        return SandboxDead(f"The sandbox launcher has ended (status {self.process.poll()}).{self.log()}")

    def log(self) -> str:
        """The last words of launcher and workers."""
        try:
            text = (self.run.path / "launcher.log").read_text(errors="replace").strip()
        except OSError:
            return ""
        return f" Its log ends with: {text[-500:]}" if text else ""

    def close(self) -> None:
        """End the launcher and with it every box; their directories are gone afterwards."""
        if self.pid != os.getpid():
            return
        self.janitor.close()
        self._control.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.run.lock >= 0:
            close_run(self.run)
            self.run.lock = -1

    def abandon(self) -> None:
        """In a forked child of the owner: let go of what is the parent's."""
        self._control.close()
        os.close(self.run.lock)


def receive(channel: socket.socket) -> Any:
    """The next frame; None at the end. Raises SandboxInfraError after the channel's timeout."""
    parts: list[bytes] = []
    try:
        for wanted in (wire.HEADER.size, -1):
            count = wanted if wanted > 0 else wire.HEADER.unpack(parts[0])[0]
            part = bytearray()
            while len(part) < count:
                data = channel.recv(min(count - len(part), 1 << 20))
                if not data:
                    return None
                part += data
            parts.append(bytes(part))
    except TimeoutError:
        raise SandboxInfraError("A sandbox worker did not answer in time.") from None
    except ConnectionError:
        return None
    return marshal.loads(parts[1])


_own = Companion(Launcher)


def launcher() -> Launcher:
    """This process's launcher; started at the first call, and again if it has ended."""
    return _own.get()


def stop() -> None:
    """End this process's launcher, and all its boxes."""
    _own.stop()
