"""The system call filter: a table of what is refused, and its BPF program.

Refused is what widens the kernel's surface without being needed to run programs: namespaces, mounts, tracing,
keys, io_uring, BPF, modules, clocks. Numbers above the last known one get ENOSYS, so that a newer kernel adds
nothing by itself. The wrong architecture and x32 kill.
"""

from __future__ import annotations

import ctypes
import struct

from hetero.sandbox.launcher.kernel import MACHINE, PR_SET_NO_NEW_PRIVS, call, prctl

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LAST_KNOWN = 462
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
NAMESPACE_FLAGS = 0x7E020080
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
RLIMIT_CORE, RLIMIT_LOCKS = 4, 10

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(_ARCH)
"""Where there is a table."""
_SPECIAL = {
    "x86_64": {
        "clone": 56,
        "clone3": 435,
        "ioctl": 16,
        "socket": 41,
        "socketpair": 53,
        "personality": 135,
        "setrlimit": 160,
        "prlimit64": 302,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "ioctl": 29,
        "socket": 198,
        "socketpair": 199,
        "personality": 92,
        "setrlimit": 164,
        "prlimit64": 261,
    },
}
DENIED: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64); -1 where the architecture has none
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, -1),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setaffinity": (203, 122),
    "memfd_secret": (447, 447),
    "uselib": (134, -1),
    "_sysctl": (156, -1),
    "nfsservctl": (180, 42),
}
"""sched_setaffinity is refused because the owner places sandboxes beside its own threads."""
UNCOUNTED = {"memfd_create": (319, 279), "shmget": (29, 194)}


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value & 0xFFFFFFFF)


def _jump(code: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("HBBI", code, yes, no, value & 0xFFFFFFFF)


_LOAD, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT, _JUMP = 0x20, 0x06, 0x15, 0x35, 0x45, 0x05
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16
_FARTHEST = 255
"""How many instructions a conditional jump may skip."""
Block = tuple[bytes, ...]
_ALLOW: Block = (_statement(_RETURN, ALLOW),)


def _error(number: int) -> Block:
    return (_statement(_RETURN, ERRNO | number),)


def program(
    machine: str = MACHINE, anonymous_files: bool = True, families: tuple[int, ...] = FAMILIES
) -> bytes:
    """The BPF instructions. Raises OSError for a machine without a table.

    Without `anonymous_files`, memfd_create and System V shared memory are refused: memory that no resource
    limit counts, for machines without a memory cgroup. `families`: what socket() may make; socketpair() is
    always open to FAMILIES, because its two ends only reach each other.

    The verdict is found by bisection. Each process that installs the filter has the kernel run it for every
    system call number, to learn which ones always pass; a list of comparisons makes that slow.
    """
    if machine not in _ARCH:
        raise OSError(ENOSYS, f"no system call table for {machine}")
    column = list(_ARCH).index(machine)
    special = _SPECIAL[machine]
    denied = [*DENIED.values(), *([] if anonymous_files else UNCOUNTED.values())]
    verdicts = {numbers[column]: _error(EPERM) for numbers in denied if numbers[column] >= 0}
    verdicts |= {special[name]: block for name, block in _judged(families).items()}
    bounds = [(0, verdicts.get(0, _ALLOW))]
    for number in range(1, LAST_KNOWN + 1):
        verdict = verdicts.get(number, _ALLOW)
        if verdict != bounds[-1][1]:
            bounds.append((number, verdict))
    bounds.append((LAST_KNOWN + 1, _error(ENOSYS)))
    kill = _statement(_RETURN, KILL)
    head = [_statement(_LOAD, _ARCHITECTURE), _jump(_EQUAL, _ARCH[machine], 1, 0), kill]
    head += [_statement(_LOAD, _NUMBER)]
    if machine == "x86_64":
        head += [_jump(_AT_LEAST, 0x40000000, 0, 1), kill]
    return b"".join([*head, *_bisect(bounds)])


def _bisect(bounds: list[tuple[int, Block]]) -> Block:
    """Instructions that go to the block of the last bound that the loaded number has reached."""
    if len(bounds) == 1:
        return bounds[0][1]
    middle = len(bounds) // 2
    below, above = _bisect(bounds[:middle]), _bisect(bounds[middle:])
    if len(below) <= _FARTHEST:
        return (_jump(_AT_LEAST, bounds[middle][0], len(below), 0), *below, *above)
    return (_jump(_AT_LEAST, bounds[middle][0], 0, 1), _statement(_JUMP, len(below)), *below, *above)


def _judged(families: tuple[int, ...]) -> dict[str, Block]:
    """Calls whose arguments decide."""
    first, second, third = (_statement(_LOAD, _FIRST + 8 * index) for index in range(3))
    high = _statement(_LOAD, _FIRST + 8 * 2 + 4)
    is_core = _jump(_EQUAL, RLIMIT_CORE, 1, 0)
    done, refuse = _statement(_RETURN, ERRNO | 0), _statement(_RETURN, ERRNO | EPERM)
    return {
        "clone3": _error(ENOSYS),
        "clone": (first, _jump(_ANY_BIT, NAMESPACE_FLAGS, 0, 1), refuse, *_ALLOW),
        "personality": _one_of((0, 0xFFFFFFFF, 0x0040000), EPERM),
        "socket": _one_of(families, EAFNOSUPPORT),
        "socketpair": _one_of(FAMILIES, EAFNOSUPPORT),
        "ioctl": (second, _jump(_EQUAL, TIOCSTI, 1, 0), _jump(_EQUAL, TIOCLINUX, 0, 1), refuse, *_ALLOW),
        # Setting RLIMIT_CORE succeeds and does nothing: 1 is the one value with which the kernel starts no
        # host program for a core dump, and who asks for 0 wants no dump either. RLIMIT_LOCKS is a mark.
        "setrlimit": (first, is_core, _jump(_EQUAL, RLIMIT_LOCKS, 0, 1), done, *_ALLOW),
        "prlimit64": (
            *(second, is_core, _jump(_EQUAL, RLIMIT_LOCKS, 0, 5), third, _jump(_EQUAL, 0, 0, 2)),
            *(high, _jump(_EQUAL, 0, 1, 0), done, *_ALLOW),
        ),
    }


def _one_of(values: tuple[int, ...], error: int) -> Block:
    """The call passes only with one of `values` as its first argument."""
    tests = [_jump(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return (_statement(_LOAD, _FIRST), *tests, *_error(error), *_ALLOW)


def install(code: bytes) -> None:
    """Filter this thread's system calls from now on, for ever."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.c_char_p(code)
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p).value)
    call("seccomp", 1, 0, header)
