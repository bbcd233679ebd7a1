"""A command without namespaces: Landlock and seccomp around a process of the boxes' user on the host."""

from __future__ import annotations

import os

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher.confine import attach, confine, find_and_execute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Bare:
    """Starts the command as a child of this process."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.failure = ""

    def start(self, stdio: tuple[int, int, int]) -> tuple[int, int]:
        """(pid, pidfd) of the command."""
        request = self.request
        most = request["sums"]["processes"]
        if most:
            request["limits"]["processes"] = num_processes() + most
        (failure, report), runner = os.pipe(), os.getpid()
        pid, handle = k.clone(0)
        if pid == 0:
            _become(request, stdio, report, runner)
        os.close(report)
        self.failure = os.read(failure, 4096).decode("utf-8", "replace")
        os.close(failure)
        return pid, handle

    def outcome(self, status: int, kept: dict[str, bytes]) -> dict[str, Any]:
        """How it ended."""
        number, _, text = self.failure.partition("|")
        signal = status & 0x7F
        return {
            **kept,
            "exit": None if signal else status >> 8,
            "signal": signal or None,
            "failure": text,
            "errno": int(number) if self.failure else 0,
        }

    def clean(self) -> None:
        """Nothing is left."""


def _become(request: dict[str, Any], stdio: tuple[int, int, int], report: int, runner: int) -> None:
    """Confine this process and execute the command; on failure write errno and text to `report`."""
    stage = "set up"
    try:
        k.prctl(k.PR_SET_PDEATHSIG, k.SIGKILL)
        if os.getppid() != runner:  # it was killed before
            os._exit(127)
        attach(request, stdio)
        k.close_all_but((0, 1, 2, report))
        stage = "cwd " + request["cwd"]
        os.chdir(request["cwd"])
        stage = "confine"
        confine(request)
        stage = request["argv"][0]
        find_and_execute(request["argv"], request["env"])
    except BaseException as error:
        number = getattr(error, "errno", None) or 5
        text = os.strerror(number) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        os.write(report, f"{number}|{stage}: {text}".encode())
    os._exit(127)


def num_processes() -> int:
    """Processes and threads of this user on the whole machine: what RLIMIT_NPROC counts."""
    uid, count = os.geteuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count
