"""Landlock: a second wall inside the mount namespace, that holds even where a mount was forgotten.

Everything may be read and executed; writing needs a listed path. TCP is left to the network namespace.
Signals and abstract Unix sockets stay within the sandbox (ABI 6).
"""

from __future__ import annotations

import os
import stat
import struct

from hetero.sandbox.launcher.kernel import PR_SET_NO_NEW_PRIVS, call, prctl

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_CHANGES = (0x1FFF & ~(EXECUTE | READ_FILE | READ_DIR)) | REFER | TRUNCATE
_SIGNALS = 2
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ = EXECUTE | READ_FILE | READ_DIR


def abi() -> int:
    """Landlock's version here; 0 if there is none."""
    try:
        return call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def restrict(readable: tuple[str, ...], writable: tuple[str, ...], version: int, tcp: bool = True) -> None:
    """Let this process and its children read below `readable` and write below `writable` only.

    `tcp=False` refuses TCP as well (ABI 4). Paths that do not exist are left out. Raises OSError.
    """
    handled = READ | _CHANGES
    if version < 3:
        handled &= ~TRUNCATE
    if version < 2:
        handled &= ~REFER
    network = 3 if version >= 4 and not tcp else 0
    scoped = 3 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", handled, network, scoped)[:size]
    ruleset = call("landlock_create_ruleset", attributes, size, 0)
    for paths, rights in ((readable, READ), (writable, READ | _CHANGES)):
        for path in paths:
            _allow(ruleset, path, rights & handled)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def enclose() -> None:
    """Put this process and all that it will start into a domain out of which no signal leads: then a signal
    to everybody reaches all of them, and nobody else. Raises OSError where that does not hold."""
    if abi() < 6:
        raise OSError(38, "Landlock does not hold signals in here")
    ruleset = call("landlock_create_ruleset", struct.pack("QQQ", 0, 0, _SIGNALS), 24, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    raise OSError(38, "signals leave this Landlock domain")


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            rights &= _FILE_RIGHTS
        call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)
