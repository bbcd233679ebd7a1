"""System calls that the standard library lacks, through libc; each raises OSError with what was tried.

The GIL is held during the calls (PyDLL): the launcher has one thread, and a child of a raw `clone` goes on
with the interpreter's state as it was.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWCGROUP = 0x80, 0x20000, 0x2000000
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_PIDFD = 0x20000000, 0x40000000, 0x1000
CLONE_INTO_CGROUP = 1 << 33
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
AT_RECURSIVE, AT_EMPTY_PATH, AT_FDCWD = 0x8000, 0x1000, -100
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_NO_NEW_PRIVS = 1, 4, 15, 38
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT = 24, 36, 47
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 2, 4, 8, 16
SIGCHLD, SIGKILL, SIGSTOP, SIGCONT = 17, 9, 19, 18

MACHINE = os.uname().machine
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "seccomp": 277},
}.get(MACHINE, {})
_SHARED = {
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
    "clone3": 435,
    "close_range": 436,
    "open_tree": 428,
    "move_mount": 429,
    "openat2": 437,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

_Three, _Four, _Eleven = ctypes.c_uint64 * 3, ctypes.c_uint64 * 4, ctypes.c_uint64 * 11
"""Made here: to make a type takes longer than most calls, and would be done again in every child."""
_CAPABILITIES = tuple(ctypes.c_ulong(number) for number in range(64))
_CAPSET = ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)())

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> int:
    """`result`, unless it is negative: then OSError of errno."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: object, what: str = "") -> int:
    """System call `name`; integers are passed as longs, the rest as ctypes does. Raises OSError."""
    number = _SHARED.get(name) or _NUMBERS.get(name)
    if number is None:
        raise OSError(38, f"{name}: not known on {MACHINE}")
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check(int(_libc.syscall(ctypes.c_long(number), *passed)), what or name)


def clone(flags: int, group: int = -1) -> tuple[int, int]:
    """(pid, pidfd) in the parent, (0, -1) in the child, which is born into the v2 control group whose
    directory `group` is."""
    handle = ctypes.c_int(-1)
    if group < 0:
        pid = call("clone", flags | CLONE_PIDFD | SIGCHLD, 0, ctypes.byref(handle), 0, 0)
    else:
        words = _Eleven(flags | CLONE_PIDFD | CLONE_INTO_CGROUP, ctypes.addressof(handle))
        words[4], words[10] = SIGCHLD, group
        pid = call("clone3", ctypes.byref(words), ctypes.sizeof(words))
    return pid, (handle.value if pid else -1)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    check(_libc.unshare(flags), "unshare")


def setns(handle: int, flags: int) -> None:
    """Enter the namespaces `flags` of the process behind a pidfd."""
    check(_libc.setns(handle, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None)
    check(result, f"mount {kind or 'bind'} on {target}")


def bind(source: str, target: str, recursive: bool = True) -> None:
    """Make `source` visible at `target`, with what is mounted below it."""
    mount(source, target, flags=MS_BIND | (MS_REC if recursive else 0))


def pick_up(handle: int, recursive: bool = True) -> int:
    """A copy of the mount behind a descriptor (with what is mounted below it), not mounted anywhere."""
    flags = 1 | os.O_CLOEXEC | AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)  # OPEN_TREE_CLONE
    return call("open_tree", handle, b"", flags)


def put_down(handle: int, target: str) -> None:
    """Mount what `pick_up` gave at `target`; closes the descriptor."""
    from_descriptor, follow_links = 4, 16
    call("move_mount", handle, b"", AT_FDCWD, target.encode(), from_descriptor | follow_links, what=target)
    os.close(handle)


def set_mount(target: str, attributes: int, recursive: bool = True) -> None:
    """Add mount attributes (ATTR_*); none is taken away."""
    words = _Four(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call(
        "mount_setattr",
        AT_FDCWD,
        target.encode(),
        flags,
        ctypes.byref(words),
        32,
        what=f"mount_setattr {target}",
    )


def enter_root(root: str) -> None:
    """Make `root` the only root there is in this mount namespace."""
    os.chdir(root)
    call("pivot_root", b".", b".")
    check(_libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def prctl(option: int, *arguments: int) -> int:
    """prctl(2)."""
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return check(_libc.prctl(option, *padded), f"prctl {option}")


def sethostname(name: bytes) -> None:
    """sethostname(2)."""
    check(_libc.sethostname(name, len(name)), "sethostname")


def pidfd_open(pid: int) -> int:
    """A handle of a process; readable when it has ended."""
    return call("pidfd_open", pid, 0)


def pidfd_signal(handle: int, number: int) -> None:
    """Signal the process behind a handle."""
    call("pidfd_send_signal", handle, number, None, 0)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor that is not in `kept`."""
    first = 0
    for handle in sorted(set(kept)):
        if handle > first:
            call("close_range", first, handle - 1, 0)
        first = handle + 1
    call("close_range", first, 0xFFFFFFFF, 0)


def openat2(directory: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2)."""
    words = _Three(flags | os.O_CLOEXEC, mode, resolve)
    return call("openat2", directory, path.encode(), ctypes.byref(words), 24, what=path)


def drop_capabilities() -> None:
    """No capability in any set, now and after any exec."""
    drop, option = _libc.prctl, ctypes.c_ulong(PR_CAPBSET_DROP)
    for number in _CAPABILITIES:
        if drop(option, number) < 0:
            break
    prctl(PR_CAP_AMBIENT, 4)  # clear all
    call("capset", *_CAPSET)
