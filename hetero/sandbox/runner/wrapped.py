"""A command inside another program's sandbox: bubblewrap, gVisor. We time it and end it from outside."""

from __future__ import annotations

import os
import resource

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import tree
from hetero.sandbox.launcher.confine import attach, filter_of, limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NOT_THERE = (b"o such file", b"ot found", b"error finding")
_OWN_LIMITS = ("space", "processes", "file")


class Wrapped:
    """Base: starts `argv()` as a child, with the request's environment and limits."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request

    def start(self, stdio: tuple[int, int, int]) -> tuple[int, int]:
        """(pid, pidfd) of the wrapper. Raises OSError."""
        raise NotImplementedError

    def outcome(self, status: int, kept: dict[str, bytes]) -> dict[str, Any]:
        """How the command ended, from the wrapper's wait status and the output. Raises OSError when there was
        no command."""
        raise NotImplementedError

    def clean(self) -> None:
        """Remove what the wrapper needed on disk."""

    def _spawn(self, stdio: tuple[int, int, int], argv: list[str], kept: tuple[int, ...]) -> tuple[int, int]:
        pid, handle = k.clone(0)
        if pid == 0:
            try:
                k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
                attach(self.request, stdio)
                for number in kept:
                    os.set_inheritable(number, True)
                k.close_all_but((0, 1, 2, *kept))
                limit(self.request)
                os.chdir("/")
                os.execve(argv[0], argv, self.request["env"])
            except BaseException as error:
                os.write(2, f"{argv[0]}: {error}\n".encode())
            os._exit(127)
        return pid, handle

    def _ended(self, status: int, kept: dict[str, bytes], failure: bytes) -> dict[str, Any]:
        """How it ended. `failure`: why the command could not be executed, the last line of stderr."""
        signal, number = status & 0x7F, 0
        if failure:
            number = 2 if any(words in failure for words in _NOT_THERE) else 13
            kept["stderr"] = kept["stderr"].strip().removesuffix(failure)
        ended = {"exit": None if signal else status >> 8, "signal": signal or None}
        return {**kept, **ended, "failure": failure.decode("utf-8", "replace"), "errno": number}


class Bubblewrap(Wrapped):
    """bwrap. Its options travel on a descriptor, so the box cannot read them in its first process."""

    def start(self, stdio: tuple[int, int, int]) -> tuple[int, int]:
        """(pid, pidfd) of bwrap; the command waits until its limit of processes is set."""
        request = self.request
        told, tell = os.pipe()
        held, release = os.pipe()
        options = [*request["wrapper"]["options"], "--json-status-fd", str(tell), "--block-fd", str(held)]
        kept = [tell, held]
        if "seccomp" not in request["weaken"]:
            kept.append(_memory(filter_of(request["anonymous_files"], sockets=True)))
            options += ["--seccomp", str(kept[-1])]
        kept.append(_memory(b"".join(option.encode() + b"\0" for option in options)))
        argv = [request["wrapper"]["program"], "--args", str(kept[-1]), "--", *request["argv"]]
        most, request["limits"]["processes"] = request["limits"]["processes"], None
        found = self._spawn(stdio, argv, tuple(kept))
        for number in kept:
            os.close(number)
        self.begun = b"child-pid" in (line := os.read(told, 4096))
        if self.begun:
            inner = int(line.partition(b'"child-pid"')[2].strip(b' :"').partition(b",")[0].strip(b" }\n"))
            if most:  # counted in the box's own user namespace, because it is set on a process inside
                resource.prlimit(inner, resource.RLIMIT_NPROC, (most, most))
            os.write(release, b"g")
        os.close(release)
        return found  # `told` stays open: bwrap writes to it once more when the command has ended

    def outcome(self, status: int, kept: dict[str, bytes]) -> dict[str, Any]:
        """How the command ended: a signal reads as exit status 128 + its number, as bwrap says it."""
        if not self.begun:
            raise OSError(1, f"bwrap made no sandbox: {kept['stderr'].decode('utf-8', 'replace').strip()}")
        last = kept["stderr"].strip().rpartition(b"\n")[2]
        told = status >> 8 == 1 and last.startswith((b"bwrap: execvp ", b"bwrap: Can't chdir to "))
        return self._ended(status, kept, last if told and not self._could_start() else b"")

    def _could_start(self) -> bool:
        """Whether the program and its directory are there: then a command only says what bwrap would say."""
        request = self.request
        name = request["argv"][0]
        folders = [""] if "/" in name else request["env"].get("PATH", "").split(":")
        found = [self._on_host(os.path.join(request["cwd"], folder, name)) for folder in folders]
        there = any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found)
        return there and os.path.isdir(self._on_host(request["cwd"]))

    def _on_host(self, path: str) -> str:
        """Where a path of the box lies, links of the tree followed."""
        tree = os.path.realpath(self.request["tree"])
        real = os.path.realpath(tree + path).removeprefix(tree)
        for inside, host in self.request["wrapper"]["places"]:
            if real == inside or real.startswith(inside.rstrip("/") + "/"):
                return host + real[len(inside.rstrip("/")) :]
        return tree + real


class Gvisor(Wrapped):
    """runsc, with a bundle of its own for every command."""

    def start(self, stdio: tuple[int, int, int]) -> tuple[int, int]:
        """(pid, pidfd) of runsc. The command's limits are in its specification, not on runsc."""
        request, wrapper = self.request, self.request["wrapper"]
        os.mkdir(wrapper["bundle"], 0o700)
        with open(os.path.join(wrapper["bundle"], "config.json"), "w", encoding="utf-8") as file:
            file.write(wrapper["config"])
        request["limits"] |= dict.fromkeys(_OWN_LIMITS)
        return self._spawn(stdio, [wrapper["program"], *wrapper["options"]], ())

    def outcome(self, status: int, kept: dict[str, bytes]) -> dict[str, Any]:
        """How the command ended. What runsc itself says is in its log, where no command can write."""
        try:
            with open(self.request["wrapper"]["log"], "rb") as file:
                entries = file.read().splitlines()
        except FileNotFoundError:  # it was ended before it had said anything
            entries = []
        said = [entry.partition(b'"msg":"')[2] for entry in entries if b'"level":"error"' in entry]
        fatal = said[-1].partition(b'","level"')[0].replace(b'\\"', b'"') if said else b""
        if fatal and not any(words in fatal for words in (b"failed to load", b"executable")):
            raise OSError(5, fatal.decode("utf-8", "replace")[-500:])
        return self._ended(status, kept, fatal)

    def clean(self) -> None:
        """The bundle."""
        tree.remove(self.request["wrapper"]["bundle"])


def _memory(data: bytes) -> int:
    """A file in memory with that content, to be read from its start."""
    handle = os.memfd_create("wrapper")
    os.write(handle, data)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
