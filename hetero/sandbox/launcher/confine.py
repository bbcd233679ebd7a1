"""What the command's own process does to itself before it becomes the command."""

from __future__ import annotations

import _signal
import fcntl
import os
import resource

from hetero.sandbox.launcher import kernel as k
from hetero.sandbox.launcher import landlock, seccomp
from hetero.sandbox.launcher.groups import Seat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_LIMITS = {
    "cpu": resource.RLIMIT_CPU,
    "file": resource.RLIMIT_FSIZE,
    "space": resource.RLIMIT_AS,
    "processes": resource.RLIMIT_NPROC,
    "files": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
}
_RESET = (
    _signal.SIGPIPE,
    _signal.SIGXFSZ,
    _signal.SIGINT,
    _signal.SIGTERM,
    _signal.SIGHUP,
    _signal.SIGCHLD,
)
LANDLOCK = landlock.abi()


OURS = "!"
"""How reports of failures begin that are ours, not the command's."""


def become_command(
    request: dict[str, Any], stdio: tuple[int, int, int], seat: Seat, report: int, nested: bool
) -> NoReturn:
    """Confine this process and execute the request's command.

    Args:
        report: descriptor for errno and text of a failure.
        nested: the PID namespace is the command's own, and lacks its /proc.
    """
    stage = ""
    try:
        seat.take()
        attach(request, stdio)
        limit(request)
        if nested:
            k.mount("proc", "/proc", "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC)
        disarm(request)
        os.dup2(report, 3, inheritable=False)
        report = 3
        k.close_all_but((0, 1, 2, 3))
        stage = "cwd " + request["cwd"]
        os.chdir(request["cwd"])
        stage = ""
        wall_in(request)
        stage = request["argv"][0]
        request.get("start", find_and_execute)(request["argv"], request["env"])
    except BaseException as error:
        number = getattr(error, "errno", None) or 5
        text = os.strerror(number) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        told = f"{number}|{stage}: {text}" if stage else f"{OURS}{number}|{text}"
        os.write(report, told.encode())
    os._exit(127)


def attach(request: dict[str, Any], stdio: tuple[int, int, int]) -> None:
    """A session of its own, signals as programs expect them, the standard streams."""
    for number in _RESET:  # ignored by Python or the launcher; the command must not inherit that
        _signal.signal(number, _signal.SIG_DFL)
    os.setsid()
    if request["terminal"]:
        _control(stdio[0])
    for target, handle in enumerate(stdio):
        os.dup2(handle, target)


def limit(request: dict[str, Any]) -> None:
    """Resource limits, priority, cores."""
    for name, value in request["limits"].items():
        if value is not None:
            hard = value + 1 if name == "cpu" else value
            resource.setrlimit(_LIMITS[name], (value, hard))
    os.nice(request["nice"])
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])


def confine(request: dict[str, Any]) -> None:
    """Limits, no capabilities, Landlock, seccomp. The order matters: each step forbids what came before."""
    limit(request)
    disarm(request)
    wall_in(request)


def disarm(request: dict[str, Any]) -> None:
    """No capabilities, and files that only their owner can write."""
    if "caps" not in request["weaken"]:
        k.drop_capabilities()
    os.umask(0o022)


def wall_in(request: dict[str, Any]) -> None:
    """Landlock, then seccomp, which forbids what installs Landlock."""
    weaken = request["weaken"]
    k.prctl(k.PR_SET_DUMPABLE, 1)
    if LANDLOCK and "landlock" not in weaken:
        readable, writable = tuple(request["readable"]), tuple(request["writable"])
        landlock.restrict(readable, writable, LANDLOCK, tcp=request["sockets"])
    if "seccomp" not in weaken:
        seccomp.install(filter_of(request["anonymous_files"], request["sockets"]))


def filter_of(anonymous_files: bool, sockets: bool) -> bytes:
    """The system call filter; made once. Only socket pairs pass without `sockets`."""
    kind = anonymous_files, sockets
    if kind not in _FILTERS:
        families = seccomp.FAMILIES if sockets else ()
        _FILTERS[kind] = seccomp.program(anonymous_files=anonymous_files, families=families)
    return _FILTERS[kind]


_FILTERS: dict[tuple[bool, bool], bytes] = {}
for _files in (False, True):
    filter_of(_files, sockets=True)  # in the launcher, so that no command waits for it


def find_and_execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """execvp, without what the standard library imports for it. Raises the most telling OSError."""
    name, refused = argv[0], None
    if "/" in name:
        os.execve(name, argv, env)
    for directory in env.get("PATH", "").split(":"):
        path = f"{directory or '.'}/{name}"
        try:
            os.stat(path)  # much cheaper than an attempt to execute what is not there
            os.execve(path, argv, env)
        except FileNotFoundError:
            continue
        except OSError as error:
            refused = error
    raise refused or FileNotFoundError(2, "No such file or directory")


def _control(terminal: int) -> None:
    fcntl.ioctl(terminal, 0x540E, 0)  # TIOCSCTTY
